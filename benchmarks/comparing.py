"""Where the images are that a benchmark trains on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ARCHIVES = ("cifar10-jpeg-q75.tar.xz", "cifar-10-binary.tar.gz")
"""The names of files that hold CIFAR-10, the preferred one first."""


def images_or(until_then: str, told: str | None = None, *, needed: bool = False) -> Path | None:
    """As `images`; where they are nowhere, and neither `told` of nor `needed`, say so and give None."""
    try:
        return images(told)
    except SystemExit as error:
        if told or needed:
            raise
        print(f"{error}\nUntil then {until_then}.", file=sys.stderr)
        return None


def images(told: str | None = None) -> Path:
    """Where CIFAR-10 is: as told, in the folder TACIT_DATA, or where `tacit compare --download` keeps it.

    A folder that holds one of its archives stands for the archive.

    Raises:
        SystemExit: it is nowhere; the message says where that was looked for, and how to get it.
    """
    from tacit_lab.recipes.data import download

    root = os.environ.get("TACIT_DATA") if told is None else told
    places = [Path(root, name) for name in ARCHIVES] if root else []
    if told is not None:
        places.append(Path(told))
    else:
        fetched = download.fetched("cifar10")
        places += [fetched] if fetched else []
    for place in places:
        if place.exists():
            return place.absolute()
    looked = told or ", ".join([*map(str, places), "what tacit has downloaded"])
    raise SystemExit(
        f"CIFAR-10 is not here; looked at {looked}. Give --data PATH (a folder of images, or an archive), "
        "set TACIT_DATA to the folder that holds it, or fetch it: tacit compare cifar10 --download --epochs 1"
    )
