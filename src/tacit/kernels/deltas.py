"""What rounds of parameters add and subtract; on the host in one pass, where numba is loaded already."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tacit.kernels.dispatch import active_backend, numba_is_loaded, numba_kernels, numba_takes_fp32


def prepare() -> None:
    """Compile the kernels now, if numba is loaded, so that the first round need not."""
    if numba_is_loaded() and active_backend() == "numba":
        numba_kernels("deltas")


def subtract(a: Tensor, b: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """Write a - b to `out`, and to `also`; all of one shape.

    `a` may be in channels-last, and `out` of a shorter type.
    """
    order = _order(a, b, out, *([] if also is None else [also]))
    if order is not None:
        second = 0 if also is None else also.data_ptr()
        numba_kernels("deltas").subtract(
            a.data_ptr(), b.data_ptr(), out.data_ptr(), second, a.numel(), *order
        )
        return
    torch.sub(a, b, out=out)
    if also is not None:
        also.copy_(out)


def add_steps_(local: Tensor, params: Tensor, anchor: Tensor, given: Tensor) -> None:
    """Add `params - anchor - given` to `local`: of a late answer, the steps since the round left.

    `params` may be in channels-last.
    """
    order = _order(params, local, anchor, given)
    if order is not None:
        others = anchor.data_ptr(), given.data_ptr(), local.numel()
        numba_kernels("deltas").add_steps(local.data_ptr(), params.data_ptr(), *others, *order)
    else:
        local.add_(params).sub_(anchor).sub_(given)


def move_(anchor: Tensor, mean: Tensor, params: Tensor, local: Tensor | None = None) -> None:
    """Add `mean` to the anchor, and write it to `params`, with `local` on top of it.

    `params` may be in channels-last.
    """
    order = _order(params, anchor, mean, *([] if local is None else [local]))
    if order is not None:
        mine = 0 if local is None else local.data_ptr()
        move = numba_kernels("deltas").move
        move(anchor.data_ptr(), mean.data_ptr(), mine, params.data_ptr(), anchor.numel(), *order)
        increment_version(params)
        return
    anchor.add_(mean)
    if local is None:
        params.copy_(anchor)
    else:
        torch.add(anchor, local, out=params)


def _order(params: Tensor, *others: Tensor) -> tuple[int, int] | None:
    """Channels and area of filters in channels-last, zeros of what lies in one order; None of others."""
    if not (numba_is_loaded() and params.dtype == torch.float32 and params.is_cpu):
        return None
    if not numba_takes_fp32(*others):
        return None
    if params.is_contiguous():
        return 0, 0
    if params.dim() == 4 and params.is_contiguous(memory_format=torch.channels_last):
        return params.shape[1], params.shape[2] * params.shape[3]
    return None
