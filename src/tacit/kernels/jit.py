"""How numba compiles the kernels for the CPU; it needs no compiler. Which version runs: see `pick`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


@cache
def half(name: str) -> Any:
    """The module `name` of compiled kernels, imported where it is first needed."""
    return import_module(f"tacit.kernels.{name}")


def address(tensor: Tensor) -> int:
    """Where this (contiguous) tensor begins, for a compiled kernel; keep it alive as long."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> Any:
    """Where these tensors begin, as int64."""
    return np.array([address(tensor) for tensor in tensors], dtype=np.int64)


def compiled(function: F, signatures: Sequence[str], fastmath: frozenset[str] = frozenset()) -> F:
    """Compile now, for these signatures; kept in numba's cache. What comes out releases the GIL.

    Args:
        fastmath: what LLVM may do to floats, such as "reassoc"; NaN and infinity stay what they are unless
            "nnan" or "ninf" are named.
    """
    import numba

    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath) or False}
    try:
        result: F = numba.njit(list(signatures), cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder can be written to: compile anew each time
        result = numba.njit(list(signatures), **options)(function)
    return result


def inlined(function: F) -> F:
    """A part of compiled kernels, compiled with whoever calls it."""
    import numba

    result: F = numba.njit(nogil=True, error_model="numpy")(function)
    return result
