"""Rising positions in few bytes (see `layout` for the formats), and entries added at their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels.dispatch import REALS, kernel
from tacit.kernels.entry_buffers import Selection
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.payloads import expect

_BYTES = (torch.uint8,)


@kernel("packed", numba=_BYTES, triton=_BYTES)
def pack_positions(positions: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """Write rising positions (int32), at most `k`, to `packed`: uint8, `position_bytes(numel, k)` of them.

    On a device, where their number is fixed, -1 stands for one that is not there; these are the last, but in
    a bitmap anywhere.
    """


def unpack_positions(packed: Tensor, numel: int, k: int, buffer: Tensor | None = None) -> Tensor:
    """The positions, int32. Compiled code writes them to `buffer`, of k + 1 entries, if there is one.

    On a device there are `k`, with -1 for each that the payload lacks.

    Raises:
        PayloadError: `packed` is not of so many.
    """
    if not packed.is_meta:
        expect(packed, "positions", position_bytes(numel, k), torch.uint8, numel)
    return unpack_all([packed], numel, k, [buffer])[0]


@kernel("packed", numba=_BYTES, triton=_BYTES)
def unpack_all(
    packed: Sequence[Tensor], numel: int, k: int, buffers: Sequence[Tensor | None] | None = None
) -> Sequence[Tensor]:
    """The positions of several peers, whose `packed` have been checked; see `unpack_positions`.

    Without `buffers` compiled code writes them to scratch memory of the thread, which its next call
    overwrites.
    """
    return [each.new_empty(k, dtype=torch.int32) for each in packed]


def scatter_add_(positions: Tensor, values: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to `out` (flat) at the positions, which are all different.

    On a device, positions that are not in `out` are left out: the host looks at none of them.

    Raises:
        PayloadError: on the CPU, a position is not in `out`. Nothing is added then.
    """
    if out.is_meta:
        return
    expect(values, "entries", positions.numel(), out.dtype, out.numel())
    outside = scatter(positions, values, out, weight)
    if outside:
        raise PayloadError(
            f"{outside} positions of a peer are not among {out.numel()} entries: its payload is not of such "
            "a tensor"
        )


@kernel("values", "out", numba=REALS)
def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float) -> int:
    """`scatter_add_`; on the CPU, how many positions are not in `out`, else 0."""
    return 0


@kernel("out")
def scatter_all_(peers: Sequence[Selection], out: Tensor, weight: float, fresh: bool) -> None:
    """Add `weight` times each peer's values to `out` (flat), in order; `fresh`: to zeros.

    One pass over memory does all. The bits are those of `scatter_add_`, peer by peer.

    Raises:
        PayloadError: on the CPU, a position is not in `out`.
    """


@kernel("out")
def clear_(positions: Tensor, out: Tensor) -> None:
    """Zero `out` (flat) at the positions (int32); on a device, at those that are in it."""
