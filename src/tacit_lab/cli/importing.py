"""The option --import: modules with algorithms and compressors of one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from tacit.environment import IMPORT
from tacit.errors import ConfigError

Modules: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Module or file with algorithms or compressors of your own, which this command, the ranks and "
        "the parameter servers then know; may be repeated, e.g. my_codecs, or methods/my_codecs.py",
        metavar="MODULE",
        show_default=False,
    ),
]


def import_own(modules: Sequence[str] | None, beside: Path | None = None) -> None:
    """Let this process, and all that it starts, know the algorithms of these modules.

    Args:
        modules: names of modules, or paths of their files or folders.
        beside: a folder in which modules are looked for, after the current one.

    Raises:
        ConfigError: there is no such module, or it cannot be imported.
    """
    if not modules:
        return
    from tacit import own_modules

    found = [_found(name, [Path.cwd(), *([] if beside is None else [beside])]) for name in modules]
    os.environ[IMPORT] = ",".join(dict.fromkeys([*own_modules.named(), *found]))
    own_modules.load_all()


def folder_of(script: Sequence[str]) -> Path | None:
    """The folder of the script that these words begin with; None if they begin with `-m` and a module."""
    return None if not script or script[0] == "-m" else Path(script[0]).resolve().parent


def _found(name: str, folders: Sequence[Path]) -> str:
    """The module as `own_modules` imports it: a path where it lies in a folder, else its name."""
    if os.sep in name or name.endswith(".py"):
        places = [Path(name).absolute()]
    else:
        places = [place for folder in folders for place in (folder / f"{name}.py", folder / name)]
    for place in places:
        is_module = place.is_file() or (place / "__init__.py").is_file()
        if is_module and place.stem.isidentifier() and "," not in str(place):
            return str(place)
    top = name.partition(".")[0]
    if all(part.isidentifier() for part in name.split(".")) and find_spec(top) is not None:
        return name
    where = " or ".join(dict.fromkeys(map(str, folders)))
    raise ConfigError(
        f"--import {name!r} is no module that Python finds in {where}: write for example "
        "--import my_codecs for my_codecs.py there, or its path"
    )
