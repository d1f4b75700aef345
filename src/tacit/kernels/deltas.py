"""What rounds of parameters add and subtract; on the host in one pass, where numba is loaded already."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tacit.kernels.dispatch import active_backend, numba_is_loaded, numba_kernels, numba_takes_fp32
from tacit.kernels.numba.jit import address


def prepare() -> None:
    """Compile the kernels now, if numba is loaded, so that the first round need not."""
    if numba_is_loaded() and active_backend() == "numba":
        numba_kernels("deltas")


def subtract(a: Tensor, b: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """Write a - b to `out`, and to `also`; all of one shape."""
    if _takes(a, b, out) and (also is None or _takes(also)):
        second = 0 if also is None else address(also)
        numba_kernels("deltas").subtract(address(a), address(b), address(out), second, a.numel())
        return
    torch.sub(a, b, out=out)
    if also is not None:
        also.copy_(out)


def add_steps_(local: Tensor, params: Tensor, anchor: Tensor, given: Tensor) -> None:
    """Add `params - anchor - given` to `local`: of a late answer, the steps since the round left."""
    if _takes(local, params, anchor, given):
        places = (address(each) for each in (local, params, anchor, given))
        numba_kernels("deltas").add_steps(*places, local.numel())
    else:
        local.add_(params).sub_(anchor).sub_(given)


def move_(anchor: Tensor, mean: Tensor, params: Tensor, local: Tensor | None = None) -> None:
    """Add `mean` to the anchor, and write it to `params`, with `local` on top of it."""
    if _takes(anchor, mean, params) and (local is None or _takes(local)):
        mine = 0 if local is None else address(local)
        move = numba_kernels("deltas").move
        move(address(anchor), address(mean), mine, address(params), anchor.numel())
        increment_version(params)
        return
    anchor.add_(mean)
    if local is None:
        params.copy_(anchor)
    else:
        torch.add(anchor, local, out=params)


def _takes(*tensors: Tensor) -> bool:
    return numba_is_loaded() and numba_takes_fp32(*tensors) and all(each.is_contiguous() for each in tensors)
