"""The largest magnitude of a tensor on the host, alone or while it is divided; and bf16, to and fro.

A largest magnitude is finite if all entries are: it takes one pass, in which a division costs nothing more.
torch needs two to four times as long for the arithmetic of bf16. Numba is not loaded for a magnitude alone:
that is 130 MB and a second of a process, which a session that compresses nothing does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.dispatch import (
    active_backend,
    numba_is_loaded,
    numba_kernels,
    numba_takes_fp32,
    on_host,
    warm_up,
)
from tacit.kernels.reference import magnitudes as reference


def largest(x: Tensor) -> float:
    """The largest magnitude: NaN or infinite where one is, 0 of nothing."""
    if x.is_meta:
        if numba_is_loaded():
            warm_up("magnitudes")
        return 0.0
    if numba_is_loaded() and numba_takes_fp32(x):
        return float(numba_kernels("magnitudes").largest(x.data_ptr(), x.numel()))
    return reference.largest(x)


def divide_(x: Tensor, by: float) -> float:
    """Divide the flat `x` in place; the quotients' `largest`."""
    if not numba_is_loaded():
        return reference.divide_(x, by)
    if numba_takes_fp32(x):
        return float(numba_kernels("magnitudes").divide(x.data_ptr(), x.numel(), by))
    if _numba_takes_pair(x, x):
        return float(numba_kernels("magnitudes").divide_bf16(x.data_ptr(), x.numel(), by))
    return reference.divide_(x, by)


def round_to_(x: Tensor, out: Tensor) -> None:
    """Write the flat `x` to `out`, whose type is shorter: rounded to the nearest, halfway to the even one."""
    if x.is_meta:
        warm_up("magnitudes")
    elif _numba_takes_pair(x, out):
        numba_kernels("magnitudes").round_bf16(x.data_ptr(), x.numel(), out.data_ptr())
    else:
        out.copy_(x)


def widen_(x: Tensor, out: Tensor) -> None:
    """Write the flat `x` to `out`, whose type is longer."""
    if _numba_takes_pair(out, x):
        numba_kernels("magnitudes").widen_bf16(x.data_ptr(), x.numel(), out.data_ptr())
    else:
        out.copy_(x)


def _numba_takes_pair(wide: Tensor, narrow: Tensor) -> bool:
    """Whether numba's kernels take these two: fp32, or the same one, and bf16."""
    if narrow.dtype != torch.bfloat16 or not on_host(narrow) or not narrow.is_contiguous():
        return False
    return active_backend() == "numba" if wide is narrow else numba_takes_fp32(wide)
