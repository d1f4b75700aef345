"""Texts of `mp2` from when that name meant what is `lowbit` now; this file goes with 0.1.0."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

from tacit.errors import ConfigError

_log = logging.getLogger("tacit")

OURS = {"bits", "late", "entropy", "bound", "variance"}
"""Parameters that `lowbit` has, and the paper's method has not."""


def check_mp2(pairs: Mapping[str, str]) -> None:
    """Refuse what stood after `mp2` before, and say once that the name alone means something else now.

    Raises:
        ConfigError: `form` is given, or what only `lowbit` has; says what to write.
    """
    ours = OURS & pairs.keys() or pairs.get("predictor") in ("last", "least-squares")
    if ours or "form" in pairs:
        name = "mp2" if pairs.get("form") == "paper" and not ours else "lowbit"
        known = OURS | {"sync_every", "predictor"} if name == "lowbit" else pairs.keys() - {"form"}
        rest = ",".join(f"{key}={value}" for key, value in pairs.items() if key in known)
        raise ConfigError(
            "mp2 is the paper's method alone now, and what it was by default before is lowbit: "
            f"write {':'.join(filter(None, (name, rest)))}"
        )
    if pairs.keys() <= {"sync_every"}:
        _say_once()


@cache
def _say_once() -> None:
    _log.warning(
        "mp2 has another meaning than before: it is the paper's method now, which sends a subset of the "
        "entries and predicts the others; what was called mp2, few bits of every entry, is lowbit"
    )
