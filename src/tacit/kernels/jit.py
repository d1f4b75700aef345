"""How the compiled kernels are compiled: by numba, where it is installed; it needs no compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])


@cache
def path() -> str:
    """Which version of the kernels is at work: "numba", or "torch" where numba is not installed."""
    return "numba" if find_spec("numba") else "torch"


def fits(*tensors: Tensor) -> bool:
    """Whether compiled kernels take these tensors: on the CPU, of fp32, fp64 or uint8."""
    kinds = (torch.float32, torch.float64, torch.uint8)
    return path() == "numba" and all(x.device.type == "cpu" and x.dtype in kinds for x in tensors)


def fits32(*tensors: Tensor) -> bool:
    """`fits`, for the kernels that are compiled for fp32 alone."""
    return fits(*tensors) and all(x.dtype == torch.float32 for x in tensors)


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
