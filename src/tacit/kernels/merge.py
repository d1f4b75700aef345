"""Merge sorted lists of entries pairwise, keep the k largest, and find out which of one's own were kept.

Lists have rising positions (int32), each at most once. What is kept follows the rule of `select`: the k
largest magnitudes; of equal ones those at the lowest positions; a NaN is smaller than everything. It does not
depend on which list is the first, nor on which version of the kernels runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tacit.kernels.dispatch import active_backend, numba_kernels, numba_takes, warm_up
from tacit.kernels.reference import merge as reference
from tacit.kernels.sparse import EntryBuffer, Selection

_PATTERNS = {
    torch.float32: (torch.int32, (1 << 31) - 1, 0xFF << 23),
    torch.float64: (torch.int64, (1 << 63) - 1, 0x7FF << 52),
}
"""The integers of the same size as a type; all their bits but the sign; the bits of infinity."""


def merge_largest(one: Selection, other: Selection, k: int, buffer: EntryBuffer) -> Selection:
    """The `k` largest of the entries of both lists, added up where both have a position.

    Args:
        buffer: is overwritten; is as long as both lists together, and neither lies in it.
    """
    if buffer.positions.is_meta:
        warm_up("merge")
        return Selection(buffer.positions[:k], buffer.values[:k])
    if not numba_takes(buffer.values):
        return reference.merge_largest(one, other, k, buffer)
    integers, mask, infinity = _PATTERNS[buffer.values.dtype]
    arrays = [*_arrays(*one, *other), k, *_arrays(*buffer, buffer.values.view(integers))]
    kept = numba_kernels("merge").merge(*arrays, mask, infinity)
    return Selection(buffer.positions[:kept], buffer.values[:kept])


def common_positions(one: Tensor, other: Tensor, positions: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The positions that both lists have, and their indices in the other list.

    Args:
        positions: int32, as long as `one`; is overwritten by the positions; may be `one`.
        where: int32, as long as `one`; is overwritten by the indices.
    """
    if one.is_meta:
        return positions[: one.numel()], where[: one.numel()]
    if one.device.type != "cpu" or active_backend() != "numba":
        return reference.common_positions(one, other)
    count = numba_kernels("merge").common_positions(*_arrays(one, other, positions, where))
    return positions[:count], where[:count]


def keep_arrived(
    own: Selection, arrived: Tensor, buffer: EntryBuffer, residual: Tensor | None = None
) -> Selection:
    """The own entries whose positions have arrived; the others are added to `residual` (flat).

    Args:
        buffer: as long as `own`; is overwritten by what is returned.
        residual: may be of a wider type than the values; then it holds there what rounding took from them.
    """
    if arrived.is_meta:
        return own
    if not numba_takes(own.values):
        return reference.keep_arrived(own, arrived, residual)
    rest = own.values[:0] if residual is None else residual
    count = numba_kernels("merge").keep_arrived(*_arrays(*own, arrived, *buffer, rest))
    return Selection(buffer.positions[:count], buffer.values[:count])


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]
