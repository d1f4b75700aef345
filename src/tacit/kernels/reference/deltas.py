"""`kernels.deltas` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def subtract(a: Tensor, b: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """See `kernels.deltas`."""
    torch.sub(a, b, out=out)
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
    else:
        torch.add(anchor, local, out=params)
