"""`select` in plain torch, on any device and without a look at a value: the host waits for nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest_torch(
    x: Tensor,
    k: int,
    at: Tensor,
    values: Tensor,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:
    """`select.select_largest`, to the first k places of `at` and `values`."""
    a = x if residual is None or new_residual is None else torch.add(x, residual, out=new_residual)
    _write(a, largest_places(a, k).sort().values, at, values, new_residual)


def in_chunks_torch(
    x: Tensor,
    per_chunk: int,
    chunk: int,
    at: Tensor,
    values: Tensor,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:
    """The reference: `select.select_in_chunks`, to the first places of `at` and `values`."""
    a = x if residual is None or new_residual is None else torch.add(x, residual, out=new_residual)
    whole = a.numel() - a.numel() % chunk
    found = []
    for first, rows in ((0, a[:whole].view(-1, chunk)), (whole, a[whole:].view(1, -1))):
        if rows.numel():
            places = largest_places(rows, min(per_chunk, rows.shape[1])).sort().values
            begin = torch.arange(len(rows), device=x.device).mul_(chunk).add_(first)
            found.append((places + begin.unsqueeze(1)).view(-1))
    _write(a, torch.cat(found), at, values, new_residual)


def largest_places(a: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes stand along the last dimension, in any order.

    On CUDA `torch.topk` takes equal ones from the lowest positions on, which the checks hold it to; elsewhere
    a stable sort does.
    """
    magnitudes = a.abs().nan_to_num_(nan=-1.0, posinf=math.inf)
    if a.is_cuda:
        return torch.topk(magnitudes, k, sorted=False).indices
    return magnitudes.sort(descending=True, stable=True).indices[..., :k]


def _write(a: Tensor, index: Tensor, at: Tensor, values: Tensor, new_residual: Tensor | None) -> None:
    at[: index.numel()] = index
    torch.index_select(a, 0, index, out=values[: index.numel()])
    if new_residual is not None:
        new_residual.index_fill_(0, index, 0.0)
