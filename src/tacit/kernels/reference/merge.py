"""`kernels.merge` in plain torch; on a device with lists of a fixed length, so that the host never waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tacit.kernels.dispatch import on_host
from tacit.kernels.entry_buffers import EntryBuffer, Selection, first_of
from tacit.kernels.reference.select import first_largest


def merge_largest(one: Selection, other: Selection, k: int, buffer: EntryBuffer) -> Selection:
    """`kernels.merge.merge_largest`."""
    if not on_host(buffer.values):
        return _merge_fixed(one, other, k, buffer)
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
    if not on_host(one):
        at, found = _places_in(other, one)
        return positions.copy_(torch.where(found, one, -1)), where.copy_(torch.where(found, at, -1))
    found = one[torch.isin(one, other)]
    return found, torch.searchsorted(other, found, out_int32=True)


def keep_arrived(
    own: Selection, arrived: Tensor, buffer: EntryBuffer, residual: Tensor | None = None
) -> Selection:
    """`kernels.merge.keep_arrived`."""
    if not on_host(own.values):
        _, found = _places_in(arrived.sort().values, own.positions)
        if residual is not None:
            rest = torch.where(found, 0.0, own.values).to(residual.dtype)
            residual.index_add_(0, own.positions, rest)
        return Selection(torch.where(found, own.positions, -1), torch.where(found, own.values, 0.0))
    kept = torch.isin(own.positions, arrived)
    if residual is not None:
        residual.index_add_(0, own.positions[~kept], own.values[~kept].to(residual.dtype))
    return Selection(own.positions[kept], own.values[kept])


# ---- on a device ----------------------------------------------------------------------------------------


def _merge_fixed(one: Selection, other: Selection, k: int, buffer: EntryBuffer) -> Selection:
    """Both lists in one order, where equal positions are neighbours: the first takes the sum of both."""
    positions, order = torch.cat([one.positions, other.positions]).sort(stable=True)
    values = torch.cat([one.values, other.values])[order]
    first = positions[:-1] == positions[1:]
    edge = first.new_zeros(1)
    values = values + torch.where(torch.cat([first, edge]), values.roll(-1), 0.0)
    magnitudes = values.abs().nan_to_num_(nan=-1.0, posinf=math.inf)
    magnitudes.masked_fill_(torch.cat([edge, first]), -2.0)  # the second of two is never among the k
    kept = first_largest(magnitudes, k).sort().values
    torch.index_select(positions, 0, kept, out=buffer.positions[:k])
    torch.index_select(values, 0, kept, out=buffer.values[:k])
    return first_of(buffer, k)


def _places_in(rising: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Where the positions are in a list of as many or more, and whether they are; -1 never is."""
    at = torch.searchsorted(rising, positions, out_int32=True).clamp_(max=rising.numel() - 1)
    return at, (rising[at] == positions) & (positions >= 0)
