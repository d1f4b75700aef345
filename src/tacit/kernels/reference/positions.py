"""`kernels.positions` in plain torch. What runs on a device never makes the host wait.

`low` is the format, as `layout.position_format` has it: the bytes of each position's low part; 4 is int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.layout import INT32


def pack_positions(positions: Tensor, k: int, low: int, packed: Tensor) -> None:
    """`kernels.positions.pack_positions`."""
    packed.zero_()
    if low == INT32:
        whole = torch.full((k,), -1, dtype=torch.int32, device=positions.device)
        whole[: positions.numel()] = positions
        packed.copy_(whole.view(torch.uint8))
        return
    places = positions.long()
    for byte in range(low):
        packed[byte * k : byte * k + positions.numel()] = (places >> 8 * byte) & 255
    if low:
        places = (places >> 8 * low) + torch.arange(positions.numel(), device=positions.device)
    row = packed[low * k :]
    bits = torch.zeros(8 * row.numel(), dtype=torch.uint8, device=positions.device)
    bits.index_fill_(0, places, 1)
    for bit in range(8):
        row |= bits[bit::8] << bit


def unpack_positions(packed: Tensor, low: int, k: int) -> Tensor:
    """`kernels.positions.unpack_positions`, on the host."""
    if low == INT32:
        whole = packed.clone().view(torch.int32)
        return whole[whole >= 0]
    places = _bits(packed[low * k :]).nonzero().view(-1)[:k]
    if low:
        places = (places - torch.arange(places.numel(), device=packed.device)) << 8 * low
    for byte in range(low):
        places += packed[byte * k : byte * k + places.numel()].long() << 8 * byte
    return places.to(torch.int32)


def unpack_positions_on_device(packed: Tensor, low: int, k: int) -> Tensor:
    """`kernels.positions.unpack_positions`: `k` positions; -1 stands for each that is not there."""
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


def scatter_add_(positions: Tensor, values: Tensor, out: Tensor, weight: float) -> int:
    """`kernels.positions.scatter_add_`, on the host: how many positions are not in `out`."""
    outside = _outside(positions, out.numel())
    if not outside:
        out.index_add_(0, positions, values, alpha=weight)
    return outside


def _outside(positions: Tensor, numel: int) -> int:
    if not positions.numel():
        return 0
    low, high = positions.aminmax()
    if int(low) < 0 or int(high) >= numel:
        return int(((positions < 0) | (positions >= numel)).sum())
    return 0


def scatter_add_on_device_(positions: Tensor, values: Tensor, out: Tensor, weight: float) -> None:
    """`kernels.positions.scatter_add_`: what is outside adds 0 to the first entry."""
    if positions.numel() and out.numel():
        inside = (positions >= 0) & (positions < out.numel())
        inner = torch.where(inside, positions, 0)
        out.index_add_(0, inner, torch.where(inside, values, 0.0), alpha=weight)


def clear_on_device_(positions: Tensor, out: Tensor) -> None:
    """`kernels.positions.clear_`: what is outside writes to the first entry what this is to be anyway."""
    if positions.numel() and out.numel():
        inside = (positions >= 0) & (positions < out.numel())
        first = torch.where((positions == 0).any(), 0.0, out[0])
        out.index_copy_(0, torch.where(inside, positions, 0).long(), torch.where(inside, 0.0, first))
