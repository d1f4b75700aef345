"""Fetch datasets from where their authors offer them; only when asked to."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tacit.errors import ConfigError, unknown
from tacit_lab.recipes.data import cache

SECONDS = 60
"""Seconds without data after which a server is given up."""
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on the web.

    Attributes:
        addresses: Where it is, without its name; each is tried in turn.
        size: In bytes.
        sha256: In hex; a file with another checksum is refused.
    """

    name: str
    addresses: tuple[str, ...]
    size: int
    sha256: str


_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
# The author's own server refuses many; the second is the copy that PyTorch keeps.
_LECUN = ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")

REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        Remote(
            name="cifar-10-binary.tar.gz",
            addresses=_TORONTO,
            size=170_052_171,
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    "mnist": (
        Remote(
            name="train-images-idx3-ubyte.gz",
            addresses=_LECUN,
            size=9_912_422,
            sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        Remote(
            name="train-labels-idx1-ubyte.gz",
            addresses=_LECUN,
            size=28_881,
            sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        Remote(
            name="t10k-images-idx3-ubyte.gz",
            addresses=_LECUN,
            size=1_648_877,
            sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        Remote(
            name="t10k-labels-idx1-ubyte.gz",
            addresses=_LECUN,
            size=4_542,
            sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
}


def fetched(dataset: str) -> Path | None:
    """The path of a dataset that was downloaded before; None if it was not."""
    home = _home(dataset)
    whole = all(_is_there(home / remote.name, remote) for remote in REMOTES[dataset])
    return _entry(dataset) if whole else None


def fetch(dataset: str, tell: Callable[[str], None]) -> Path:
    """Download what is not there yet, into the cache.

    Args:
        dataset: One of `REMOTES`.
        tell: Called with a line about each file before it is fetched.

    Returns:
        The path that the dataset's reader takes.

    Raises:
        ConfigError: There is no such dataset, no server answers, or what it sends has another checksum.
    """
    if dataset not in REMOTES:
        raise unknown("dataset", dataset, REMOTES)
    home = _home(dataset)
    for remote in REMOTES[dataset]:
        if not _is_there(home / remote.name, remote):
            _fetch(remote, home, tell)
    return _entry(dataset)


def megabytes(dataset: str) -> float:
    """The size of the download, in MB."""
    return sum(remote.size for remote in REMOTES[dataset]) / 1e6


def _home(dataset: str) -> Path:
    return cache.folder() / "downloads" / dataset


def _entry(dataset: str) -> Path:
    """A dataset of one file is that file, one of several the folder that holds them."""
    first, *more = REMOTES[dataset]
    return _home(dataset) if more else _home(dataset) / first.name


def _is_there(file: Path, remote: Remote) -> bool:
    """Whether the file was downloaded: only files with the right checksum get this name."""
    return file.is_file() and file.stat().st_size == remote.size


def _fetch(remote: Remote, home: Path, tell: Callable[[str], None]) -> None:
    reasons = []
    for address in remote.addresses:
        tell(f"fetching {address}{remote.name}, {remote.size / 1e6:.3g} MB")
        try:
            home.mkdir(parents=True, exist_ok=True)
            _save(address, remote, home)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reasons.append(f"{address}{remote.name}: {error}")
        else:
            return
    raise ConfigError(
        f"cannot download {remote.name}: {'; '.join(reasons)}. Fetch it by other means and give its place: "
        "--data PATH"
    )


def _save(address: str, remote: Remote, home: Path) -> None:
    part = home / f"{remote.name}.{os.getpid()}.part"
    digest, size = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(address + remote.name, timeout=SECONDS) as answer, part.open("wb") as out:
            while size <= remote.size and (piece := answer.read(_PIECE)):
                digest.update(piece)
                size += len(piece)
                out.write(piece)
        if digest.hexdigest() != remote.sha256:
            raise ValueError(f"what came has another checksum ({size:,} bytes of {remote.size:,})")
        part.replace(home / remote.name)
    finally:
        part.unlink(missing_ok=True)
