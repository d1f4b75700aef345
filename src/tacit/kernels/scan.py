"""The compiled half of `select`: one pass that collects the positions above a threshold.

Compiled by numba on first use and kept in its cache; it releases the GIL and needs no compiler. Blocks of 32
entries are tested together, and only blocks with a hit are looked at entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

WIDTH = 32


def _positions(x: Any, threshold: Any, out: Any) -> int:
    """Write the positions where |x| >= threshold to `out`; how many, or -1 where `out` is too short."""
    found: Any = 0
    whole = x.shape[0] - x.shape[0] % WIDTH
    for start in range(0, whole, WIDTH):
        hits: Any = 0
        for i in range(start, start + WIDTH):
            hits += np.int32(abs(x[i]) >= threshold)
        if hits:
            if found + WIDTH > out.shape[0]:
                return -1
            for i in range(start, start + WIDTH):
                out[found] = i
                found += np.int64(abs(x[i]) >= threshold)
    if found + WIDTH > out.shape[0]:
        return -1
    for i in range(whole, x.shape[0]):
        out[found] = i
        found += np.int64(abs(x[i]) >= threshold)
    return found  # type: ignore[no-any-return]


def _compiled(function: Callable[..., int]) -> Callable[..., int]:
    signatures = [f"int64({real}[::1], {real}, int32[::1])" for real in ("float32", "float64")]
    try:
        compiled: Callable[..., int] = numba.njit(signatures, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written to: compile anew each time
        compiled = numba.njit(signatures, nogil=True)(function)
    return compiled


positions = _compiled(_positions)
