"""`kernels.positions` in plain torch. What runs on a device never makes the host wait.

`low` is the format: the bytes of each position's low part; 4 is int32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels import positions as front
from tacit.kernels.dispatch import on_host
from tacit.kernels.entry_buffers import Selection
from tacit.kernels.payload_layout import INT32, position_format


def pack_positions(positions: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """`kernels.positions.pack_positions`."""
    low = position_format(numel, k)
    packed.zero_()
    if low == INT32:
        whole = torch.full((k,), -1, dtype=torch.int32, device=positions.device)
        whole[: positions.numel()] = positions
        packed.copy_(whole.view(torch.uint8))
        return
    places = positions.long()
    absent = None if on_host(packed) else places < 0
    for byte in range(low):
        part = (places >> 8 * byte) & 255
        packed[byte * k : byte * k + positions.numel()] = part if absent is None else part * ~absent
    if low:
        places = (places >> 8 * low) + torch.arange(positions.numel(), device=positions.device)
    row = packed[low * k :]
    bits = torch.zeros(8 * row.numel() + 1, dtype=torch.uint8, device=positions.device)
    bits.index_fill_(0, places if absent is None else torch.where(absent, bits.numel() - 1, places), 1)
    bits = bits[:-1]
    for bit in range(8):
        row |= bits[bit::8] << bit


def unpack_all(
    packed: Sequence[Tensor], numel: int, k: int, buffers: Sequence[Tensor | None] | None = None
) -> Sequence[Tensor]:
    """`kernels.positions.unpack_all`."""
    low = position_format(numel, k)
    unpack = _unpacked if on_host(packed[0]) else _unpacked_on_device
    return [unpack(each, low, k) for each in packed]


def _unpacked(packed: Tensor, low: int, k: int) -> Tensor:
    if low == INT32:
        whole = packed.clone().view(torch.int32)
        return whole[whole >= 0]
    places = _bits(packed[low * k :]).nonzero().view(-1)[:k]
    if low:
        places = (places - torch.arange(places.numel(), device=packed.device)) << 8 * low
    for byte in range(low):
        places += packed[byte * k : byte * k + places.numel()].long() << 8 * byte
    return places.to(torch.int32)


def _unpacked_on_device(packed: Tensor, low: int, k: int) -> Tensor:
    """`k` positions; -1 stands for each that is not there."""
    if low == INT32:
        return packed.clone().view(torch.int32)
    bits = _bits(packed[low * k :])
    number = torch.arange(k, device=packed.device)
    places = torch.searchsorted(bits.cumsum(0), number + 1)
    found = places < bits.numel()
    if low:
        places = (places - number) << 8 * low
    for byte in range(low):
        places += packed[byte * k : (byte + 1) * k].long() << 8 * byte
    return torch.where(found, places, -1).to(torch.int32)


def _bits(row: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=row.device)
    return ((row[:, None] >> shifts) & 1).view(-1)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float) -> int:
    """`kernels.positions.scatter`; on a device what is outside adds 0 to the first entry."""
    if on_host(out):
        outside = _outside(positions, out.numel())
        if not outside:
            out.index_add_(0, positions, values, alpha=weight)
        return outside
    if positions.numel() and out.numel():
        inside = (positions >= 0) & (positions < out.numel())
        inner = torch.where(inside, positions, 0)
        out.index_add_(0, inner, torch.where(inside, values, 0.0), alpha=weight)
    return 0


def scatter_all_(peers: Sequence[Selection], out: Tensor, weight: float, fresh: bool) -> None:
    """`kernels.positions.scatter_all_`."""
    if fresh:
        out.zero_()
    for peer in peers:
        front.scatter_add_(peer.positions, peer.values, out, weight)


def _outside(positions: Tensor, numel: int) -> int:
    if not positions.numel():
        return 0
    low, high = positions.aminmax()
    if int(low) < 0 or int(high) >= numel:
        return int(((positions < 0) | (positions >= numel)).sum())
    return 0


def clear_(positions: Tensor, out: Tensor) -> None:
    """`kernels.positions.clear_`; what is outside writes to the first entry what this is to be anyway."""
    if on_host(out):
        out.index_fill_(0, positions.long(), 0.0)
    elif positions.numel() and out.numel():
        inside = (positions >= 0) & (positions < out.numel())
        first = torch.where((positions == 0).any(), 0.0, out[0])
        out.index_copy_(0, torch.where(inside, positions, 0).long(), torch.where(inside, 0.0, first))
