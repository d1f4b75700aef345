"""How numba compiles the kernels for the CPU; it needs no compiler. Which version runs: see `pick`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F, signatures: Sequence[str], fastmath: frozenset[str] = frozenset()) -> F:
    """Compile now, for these signatures; kept in numba's cache. What comes out releases the GIL.

    Args:
        fastmath: what LLVM may do to floats, such as "reassoc"; NaN and infinity stay what they are unless
            "nnan" or "ninf" are named.
    """
    import numba

    options = {"nogil": True, "fastmath": set(fastmath) or False}
    try:
        result: F = numba.njit(list(signatures), cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder can be written to: compile anew each time
        result = numba.njit(list(signatures), **options)(function)
    return result


def inlined(function: F) -> F:
    """A part of compiled kernels, compiled with whoever calls it."""
    import numba

    result: F = numba.njit(nogil=True)(function)
    return result
