"""How numba compiles the kernels for the CPU; it needs no compiler. Importing this does not import numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])


def compile_now(function: Callable[..., object], signatures: Sequence[str]) -> Any:
    """Compile for these signatures; stored in numba's cache. The compiled function releases the GIL.

    Nothing may be reordered or fused: the bits are those of the reference.
    """
    import numba

    options = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return numba.njit(list(signatures), cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder can be written to: compile anew each time
        return numba.njit(list(signatures), **options)(function)


def inline(function: F) -> F:
    """A function that kernels call; it is compiled with each of them."""
    import numba

    result: F = numba.njit(nogil=True, error_model="numpy")(function)
    return result
