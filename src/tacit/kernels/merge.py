"""Merge sorted lists of entries pairwise, keep the k largest, and find which of this rank's were kept.

Lists have rising positions (int32), each at most once. What is kept follows the rule of `select`: the k
largest magnitudes; of equal ones those at the lowest positions; a NaN is smaller than everything. It does not
depend on which list is the first, nor on which version of the kernels runs.

On a device, where the host cannot know how many there are, all lists have k entries, and -1 stands for a
position that is not there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.dispatch import REALS, kernel
from tacit.kernels.entry_buffers import EntryBuffer, Selection, first_of


@kernel("buffer", numba=REALS, triton=())
def merge_largest(one: Selection, other: Selection, k: int, buffer: EntryBuffer) -> Selection:
    """The `k` largest of the entries of both lists, added up where both have a position.

    Args:
        buffer: is overwritten; is as long as both lists together, and neither lies in it.
    """
    return first_of(buffer, k)


@kernel("one", numba=(torch.int32,), triton=())
def common_positions(one: Tensor, other: Tensor, positions: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The positions that both lists have, and their indices in the other list.

    Args:
        positions: int32, as long as `one`; is overwritten by the positions; may be `one`.
        where: int32, as long as `one`; is overwritten by the indices.
    """
    return positions[: one.numel()], where[: one.numel()]


@kernel("own", numba=REALS, triton=())
def keep_arrived(
    own: Selection, arrived: Tensor, buffer: EntryBuffer, residual: Tensor | None = None
) -> Selection:
    """This rank's entries whose positions have arrived; the others are added to `residual` (flat).

    On a device there are as many as before; the others are at -1.

    Args:
        buffer: as long as `own`; overwritten by the result.
        residual: may be of a wider type than the values; then it already holds their rounding errors.
    """
    return own
