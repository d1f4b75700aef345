"""`kernels.merge` in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tacit.kernels.entry_buffers import EntryBuffer, Selection, first_of


def merge_largest(one: Selection, other: Selection, k: int, buffer: EntryBuffer) -> Selection:
    """`kernels.merge.merge_largest`."""
    positions, index = torch.unique(torch.cat([one.positions, other.positions]), return_inverse=True)
    values = buffer.values.new_zeros(positions.numel())
    values.index_add_(0, index, torch.cat([one.values, other.values]))
    magnitudes = values.abs().nan_to_num_(nan=-1.0, posinf=math.inf)
    kept = magnitudes.sort(descending=True, stable=True).indices[:k].sort().values
    buffer.positions[: kept.numel()] = positions[kept]
    buffer.values[: kept.numel()] = values[kept]
    return first_of(buffer, kept.numel())


def common_positions(one: Tensor, other: Tensor, positions: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.merge.common_positions`."""
    found = one[torch.isin(one, other)]
    return found, torch.searchsorted(other, found, out_int32=True)


def keep_arrived(
    own: Selection, arrived: Tensor, buffer: EntryBuffer, residual: Tensor | None = None
) -> Selection:
    """`kernels.merge.keep_arrived`."""
    kept = torch.isin(own.positions, arrived)
    if residual is not None:
        residual.index_add_(0, own.positions[~kept], own.values[~kept].to(residual.dtype))
    return Selection(own.positions[kept], own.values[kept])
