"""Rising positions in few bytes (see `layout` for the formats), and entries added at their positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels.dispatch import (
    addresses,
    numba_kernels,
    numba_takes,
    numba_takes_fp32,
    on_host,
    on_triton,
    run_triton,
    triton_takes,
    warm_up,
)
from tacit.kernels.layout import INT32, position_bytes, position_format
from tacit.kernels.payloads import expect
from tacit.kernels.reference import positions as reference
from tacit.kernels.sparse import Selection


def pack_positions(positions: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """Write rising positions (int32), at most `k`, to `packed`: uint8, `position_bytes(numel, k)` of them."""
    if positions.is_meta:
        warm_up("positions")
        return
    low = position_format(numel, k)
    if low != INT32 and numba_takes(packed):
        at, packed_at = positions.data_ptr(), packed.data_ptr()
        numba_kernels("positions").pack(at, positions.numel(), k, low, packed_at, packed.numel())
    elif not (low != INT32 and on_triton(packed) and run_triton("positions.pack", positions, k, low, packed)):
        reference.pack_positions(positions, k, low, packed)


def unpack_positions(packed: Tensor, numel: int, k: int, buffer: Tensor | None = None) -> Tensor:
    """The positions, int32. Compiled code writes them to `buffer`, of k + 1 entries, where it is given.

    On a device they are `k`, and -1 stands for each that the payload lacks.
    """
    if packed.is_meta:
        return packed.new_empty(k, dtype=torch.int32)
    expect(packed, "positions", position_bytes(numel, k), torch.uint8, numel)
    low = position_format(numel, k)
    if not on_host(packed):
        return _unpack_on_device([packed], low, k)[0]
    if low == INT32 or not numba_takes(packed):
        return reference.unpack_positions(packed, low, k)
    positions = torch.empty(k + 1, dtype=torch.int32) if buffer is None else buffer
    count = numba_kernels("positions").unpack(packed.data_ptr(), packed.numel(), k, low, positions.data_ptr())
    return positions[:count]


def unpack_all(packed: Sequence[Tensor], numel: int, k: int) -> Sequence[Tensor]:
    """The positions of several peers, on a device; see `unpack_positions`."""
    for each in packed:
        expect(each, "positions", position_bytes(numel, k), torch.uint8, numel)
    return _unpack_on_device(packed, position_format(numel, k), k)


def _unpack_on_device(packed: Sequence[Tensor], low: int, k: int) -> Sequence[Tensor]:
    if low == INT32:
        return [each.clone().view(torch.int32) for each in packed]
    positions = torch.full((len(packed), k), -1, dtype=torch.int32, device=packed[0].device)
    if all(map(on_triton, packed)) and run_triton("positions.unpack", packed, k, low, positions):
        return positions.unbind()
    return [reference.unpack_positions_on_device(each, low, k) for each in packed]


def scatter_add_(positions: Tensor, values: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to `out` (flat) at the positions, which are all different.

    On a device, positions that are not in `out` are left out: the host looks at none of them.

    Raises:
        PayloadError: on the CPU, a position is not in `out`. Nothing is added then.
    """
    if out.is_meta:
        return
    expect(values, "entries", positions.numel(), out.dtype, out.numel())
    if numba_takes_fp32(values, out):
        scatter, count, numel = numba_kernels("positions").scatter, positions.numel(), out.numel()
        outside = scatter(positions.data_ptr(), count, values.data_ptr(), weight, out.data_ptr(), numel)
    elif numba_takes(values, out):
        array, scatter = out.detach().numpy(), numba_kernels("positions").scatter64
        outside = scatter(positions.numpy(), values.numpy(), array.dtype.type(weight), array)
    elif on_host(out):
        outside = reference.scatter_add_(positions, values, out, weight)
    else:
        taken = triton_takes(values, out)
        if not (taken and run_triton("positions.scatter", positions, values, weight, out)):
            reference.scatter_add_on_device_(positions, values, out, weight)
        return
    if outside:
        raise PayloadError(
            f"{outside} positions of a peer are not among {out.numel()} entries: its payload is not of such "
            "a tensor"
        )


def scatter_all_(peers: Sequence[Selection], out: Tensor, weight: float, fresh: bool) -> None:
    """Add `weight` times each peer's values to `out` (flat), in order; `fresh`: to zeros.

    On the CPU one pass over memory does all. The bits are those of `scatter_add_`, peer by peer.

    Raises:
        PayloadError: on the CPU, a position is not in `out`.
    """
    positions, values = zip(*peers, strict=True) if peers else ((), ())
    if peers and numba_takes_fp32(out, *values):
        for there, what in peers:
            if what.numel() != there.numel():
                expect(what, "entries", there.numel(), out.dtype, out.numel())
        places, values_at = addresses(positions), addresses(values)
        counts = np.fromiter(map(Tensor.numel, positions), np.int64, len(peers))
        scatter, numel = numba_kernels("positions").scatter_all, out.numel()
        if scatter(places, counts, values_at, len(peers), weight, out.data_ptr(), numel, fresh):
            return
    if fresh:
        out.zero_()
    for peer in peers:
        scatter_add_(peer.positions, peer.values, out, weight)


def clear_(positions: Tensor, out: Tensor) -> None:
    """Zero `out` (flat) at the positions; on a device, at those that are in it."""
    if numba_takes_fp32(out) and positions.dtype == torch.int32:
        numba_kernels("positions").clear(positions.data_ptr(), positions.numel(), out.data_ptr(), out.numel())
    elif out.is_meta or on_host(out):
        out.index_fill_(0, positions.long(), 0.0)
    elif not (triton_takes(out) and run_triton("positions.clear", positions, out)):
        reference.clear_on_device_(positions, out)
