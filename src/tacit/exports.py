"""Packages whose names load when they are first used (PEP 562): attaching one algorithm loads no other.

Such a package imports its names `if TYPE_CHECKING`, for type checkers and editors. These lines are read here,
and are the only table of where a name is.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from tacit import _moved


@cache
def homes(package: str) -> dict[str, str]:
    """The names of a package, in the order of its lines, each with the module that has it."""
    tree = ast.parse(inspect.getsource(import_module(package)))
    blocks = [each for each in tree.body if isinstance(each, ast.If)]
    lines = [line for each in blocks for line in each.body if isinstance(line, ast.ImportFrom)]
    return {alias.asname or alias.name: str(line.module) for line in lines for alias in line.names}


def load_all(package: str) -> None:
    """Load every module that a package exports names of, for example to look at all of its classes."""
    for module in homes(package).values():
        import_module(module)


class _Package(ModuleType):
    """A package in which a function is not replaced by the module of the same name.

    Python sets a module as an attribute of its package when it is imported; here a function of that name
    stays."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in homes(self.__name__):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *homes(self.__name__)})


def on_first_use(package: str) -> Callable[[str], Any]:
    """The package's `__getattr__`, which loads a name when it is first used."""
    missing = _moved.attributes(package)
    sys.modules[package].__class__ = _Package

    def load(name: str) -> Any:
        if name.startswith("__") or name not in homes(package):
            return missing(name)
        found = getattr(import_module(homes(package)[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return load
