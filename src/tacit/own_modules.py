"""Modules with algorithms and compressors of one's own: which there are, and how they are imported.

They are named by the environment variable `TACIT_IMPORT`, which every rank and server of a run inherits, or
belong to an installed package with the entry-point group `tacit.algorithms`.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from tacit.environment import IMPORT
from tacit.errors import ConfigError

GROUP = "tacit.algorithms"
"""The entry-point group: each entry is a module that registers algorithms by `@algorithm`."""


def named() -> list[str]:
    """The modules that the environment names."""
    return [name for name in os.environ.get(IMPORT, "").split(",") if name]


def load(name: str) -> ModuleType:
    """Import a module, by the name that Python finds it by, or by the path of its file or folder.

    Raises:
        ConfigError: it cannot be imported, or another module of its name is.
    """
    path = Path(name)
    try:
        if os.sep not in name and path.suffix != ".py":
            return import_module(name)
        if str(path.parent.absolute()) not in sys.path:
            sys.path.append(str(path.parent.absolute()))
        module = import_module(path.stem)
    except ConfigError as error:
        raise ConfigError(f"--import {name} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"--import {name} cannot be imported ({type(error).__name__}: {error}): give a module that "
            "Python finds from here, such as my_codecs, or its file, such as methods/my_codecs.py"
        ) from error
    found = Path(module.__file__ or "")
    if path.resolve() not in (found.resolve(), found.parent.resolve()):
        raise ConfigError(
            f"--import {name} cannot be imported, as Python finds {module.__file__ or module} by the name "
            f"{path.stem}: rename yours"
        )
    return module


def load_all() -> None:
    """Import the modules of the environment, and those of installed packages, once.

    Raises:
        ConfigError: one of them cannot be imported, or registers an algorithm whose name is taken.
    """
    _load(tuple(named()))


@cache
def _load(names: tuple[str, ...]) -> None:
    for name in names:
        load(name)
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise ConfigError(
                f"the entry point {entry.name} = {entry.value} of the group {GROUP} cannot be loaded "
                f"({type(error).__name__}: {error}): mend the package that has it, or remove it"
            ) from error
