"""The meaning of a ratio of entries, for every compressor that keeps some of them."""

from __future__ import annotations

import math
from functools import cache

from tacit import checks


def check(ratio: float, name: str = "ratio") -> None:
    """Raise a `ConfigError` unless 0 < ratio <= 1; `name` is the parameter's name."""
    hint = "it is the share of entries that is sent; write 0.01 to send one in a hundred"
    checks.real(name, ratio, hint, above=0, most=1)


@cache
def count(ratio: float, numel: int) -> int:
    """The number of entries that is sent: rounded up; an exact decimal ratio gives the exact number."""
    return min(numel, math.ceil(round(ratio * numel, 6)))
