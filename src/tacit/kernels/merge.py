"""Merge lists of entries pairwise, keeping the k largest; and find out what became of one's own.

Lists have rising positions (int32), none twice. What is kept follows the rule of `select`: the k largest
magnitudes; of equal ones those at the lowest positions; a NaN is smaller than everything. It does not depend
on which list is the first, nor on which version of the kernels runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tacit.kernels.pick import fits, path, warming
from tacit.kernels.select import Chosen, Room

_PATTERNS = {
    torch.float32: (torch.int32, (1 << 31) - 1, 0xFF << 23),
    torch.float64: (torch.int64, (1 << 63) - 1, 0x7FF << 52),
}
"""As which whole numbers to read a type; all its bits but the sign; the bits of infinity."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.weave  # noqa: F401


def merge_largest(one: Chosen, other: Chosen, k: int, room: Room) -> Chosen:
    """The `k` largest of the entries of both lists, added up where they stand at the same position.

    Args:
        room: is overwritten; has a place for each entry of both, and neither lies in it.
    """
    if room.at.is_meta:
        warm_up(warming())
        return Chosen(room.at[:k], room.values[:k])
    if not fits(room.values):
        return merge_largest_torch(one, other, k, room)
    from tacit.kernels.weave import merge

    whole, mask, infinity = _PATTERNS[room.values.dtype]
    arguments = [*_arrays(*one, *other), k, *_arrays(*room, room.values.view(whole)), mask, infinity]
    kept = merge(*arguments)
    return Chosen(room.at[:kept], room.values[:kept])


def common(one: Tensor, other: Tensor, at: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The positions that both lists have, and their places in the other one.

    Args:
        at: is overwritten by the positions; may be `one`.
        places: is overwritten by the places, int32; as long as `one`.
    """
    if one.is_meta:
        return at[: one.numel()], places[: one.numel()]
    if one.device.type != "cpu" or path() != "numba":
        return common_torch(one, other)
    from tacit.kernels.weave import common

    count = common(*_arrays(one, other, at, places))
    return at[:count], places[:count]


def divide(mine: Chosen, arrived: Tensor, room: Room, new_residual: Tensor | None = None) -> Chosen:
    """Those of one's own entries whose positions have arrived; the others are added to `owed` (flat).

    Args:
        room: is overwritten by them; has a place for each entry.
        owed: may be of a wider type than the values, and then has there what rounding these took away.
    """
    if arrived.is_meta:
        return mine
    if not fits(mine.values):
        return divide_torch(mine, arrived, new_residual)
    from tacit.kernels.weave import divide

    count = divide(*_arrays(*mine, arrived, *room, mine.values[:0] if new_residual is None else new_residual))
    return Chosen(room.at[:count], room.values[:count])


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


# ---- the reference, in plain torch --------------------------------------------------------------------


def merge_largest_torch(one: Chosen, other: Chosen, k: int, room: Room) -> Chosen:
    """The reference: `merge_largest`."""
    at, back = torch.unique(torch.cat([one.at, other.at]), return_inverse=True)
    values = room.values.new_zeros(at.numel()).index_add_(0, back, torch.cat([one.values, other.values]))
    magnitudes = values.abs().nan_to_num_(nan=-1.0, posinf=math.inf)
    kept = magnitudes.sort(descending=True, stable=True).indices[:k].sort().values
    room.at[: kept.numel()] = at[kept]
    room.values[: kept.numel()] = values[kept]
    return Chosen(room.at[: kept.numel()], room.values[: kept.numel()])


def common_torch(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: `common`."""
    at = one[torch.isin(one, other)]
    return at, torch.searchsorted(other, at, out_int32=True)


def divide_torch(mine: Chosen, arrived: Tensor, new_residual: Tensor | None) -> Chosen:
    """The reference: `divide`."""
    there = torch.isin(mine.at, arrived)
    if new_residual is not None:
        new_residual.index_add_(0, mine.at[~there], mine.values[~there].to(new_residual.dtype))
    return Chosen(mine.at[there], mine.values[there])
