"""`kernels.deltas` in plain torch; also by anchors of bf16, of which torch would widen all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.dispatch import pieces

PIECE = 1 << 18
"""The number of an anchor's entries that are widened at a time."""


def subtract(a: Tensor, b: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """See `kernels.deltas`."""
    if b.dtype == a.dtype or b.dtype != torch.bfloat16:
        torch.sub(a, b, out=out)
    else:
        flat, common, put = a.reshape(-1), b.view(-1), out.view(-1)
        for here in pieces(common, PIECE):
            torch.sub(flat[here], common[here].float(), out=put[here])
    if also is not None:
        also.copy_(out)


def add_steps_(local: Tensor, params: Tensor, anchor: Tensor, given: Tensor) -> None:
    """See `kernels.deltas`."""
    local.add_(params).sub_(anchor).sub_(given)


def move_anchor_(anchor: Tensor, mean: Tensor, params: Tensor) -> None:
    """See `kernels.deltas`."""
    before = anchor.clone()
    anchor.add_(mean)
    torch.sub(params, before, out=mean)


def move_(anchor: Tensor, mean: Tensor | None, params: Tensor, local: Tensor | None = None) -> None:
    """See `kernels.deltas`."""
    if mean is not None:
        anchor.add_(mean)
    if local is None:
        params.copy_(anchor)
    elif anchor.dtype == params.dtype or not params.is_contiguous():
        torch.add(anchor, local, out=params)
    else:
        flat, common, left = params.view(-1), anchor.view(-1), local.view(-1)
        for here in pieces(common, PIECE):
            torch.add(common[here].float(), left[here], out=flat[here])
