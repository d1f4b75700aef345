"""How the compiled kernels are compiled: by numba, where it is installed; it needs no compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


@cache
def path() -> str:
    """Which version of the kernels is at work: "numba", or "torch" where numba is not installed."""
    return "numba" if find_spec("numba") else "torch"


@cache
def half(name: str) -> Any:
    """The module `name` of compiled kernels, imported where it is first needed."""
    return import_module(f"tacit.kernels.{name}")


def fits(*tensors: Tensor) -> bool:
    """Whether compiled kernels take these tensors: on the CPU, of fp32, fp64 or uint8."""
    return path() == "numba" and _are(tensors, (torch.float32, torch.float64, torch.uint8))


def fits32(*tensors: Tensor) -> bool:
    """`fits`, for the kernels that are compiled for fp32 alone."""
    return path() == "numba" and _are(tensors, (torch.float32,))


def _are(tensors: Sequence[Tensor], kinds: tuple[torch.dtype, ...]) -> bool:
    # In the hot path, where a generator takes three times as long.
    for tensor in tensors:  # noqa: SIM110
        if tensor.dtype not in kinds or not tensor.is_cpu:
            return False
    return True


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
    except RuntimeError:  # no folder can be written to: compile anew each time
        result = numba.njit(list(signatures), **options)(function)
    return result


def inlined(function: F) -> F:
    """A part of compiled kernels, compiled with whoever calls it."""
    import numba

    result: F = numba.njit(nogil=True, error_model="numpy")(function)
    return result
