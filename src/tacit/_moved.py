"""Where packages went: an old import raises an error that says what to write now.

Importing tacit puts a finder at the end of `sys.meta_path`. It is asked only for what nothing else has found,
so it costs nothing where a module exists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

MOVED = {
    "tacit.Cluster": "tacit_lab.cluster.Cluster",
    "tacit.LowBitPowerSGD": "tacit.compressors.QuantizedPowerSGD",
    "tacit.cli": "tacit_lab.cli",
    "tacit.compressors.LowBitPowerSGD": "tacit.compressors.QuantizedPowerSGD",
    "tacit.foresight": "tacit.planning",
    "tacit.hooks": "tacit",
    "tacit.lab": "tacit_lab",
    "tacit.pairs": "tacit.stores.pairs",
    "tacit.parameter_server": "tacit.stores.server",
}
"""Old package or name -> where it is."""


class OldImports:
    """A finder that finds nothing: it raises where an old package, or a name that is none, is imported."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raise for what is elsewhere now, or nearly something public; else leave it to Python.

        Raises:
            ModuleNotFoundError: a package of that name moved; says where to.
            ImportError: `from package import name`, and that name is nearly a public one; says which.
        """
        if fullname in MOVED:
            raise ModuleNotFoundError(_moved(fullname))
        package, _, name = fullname.rpartition(".")
        public = getattr(sys.modules.get(package), "__all__", ())
        near = [] if name in public else get_close_matches(name, public, n=1)  # pydoc asks for any name
        if package.startswith("tacit.") and near:
            raise ImportError(f"{package} has no {name}. Did you mean {near[0]!r}?")


def install() -> None:
    """Put the finder after all others, once."""
    if OldImports not in sys.meta_path:
        sys.meta_path.append(OldImports)


def attributes(module: str) -> Callable[[str], Any]:
    """What a module's `__getattr__` is, where some of its names are elsewhere now."""

    def missing(name: str) -> Any:
        old = f"{module}.{name}"
        near = get_close_matches(name, vars(sys.modules[module]).get("__all__", ()), n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(
            _moved(old) if old in MOVED else f"module {module!r} has no attribute {name!r}{hint}"
        )

    return missing


def _moved(old: str) -> str:
    return f"{old} is {MOVED[old]} now: write that instead"
