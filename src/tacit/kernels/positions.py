"""Rising positions in few bytes, and entries back to where they were.

How positions are written is chosen by how many there are among how many, so that the size is known
beforehand: as a bitmap; as low and high parts (Elias 1974, Fano 1971); or as they are, in int32. Low parts
are the lowest byte, or two, of each position. The rest of the j-th position, which only ever rises, is a 1
at place rest + j of a row of bits. That is within 2 bits an entry of the least there can be.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels.jit import address, half
from tacit.kernels.payloads import expect
from tacit.kernels.pick import (
    by_triton,
    fits,
    fits32,
    fits_triton,
    fits_triton32,
    on_host,
    on_triton,
    path,
    warming,
)

BITMAP, INT32 = 0, 4
"""Ways of writing, by the whole bytes that each position takes; 1 and 2 are low and high parts."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.places  # noqa: F401


@cache
def sizes(numel: int, k: int) -> dict[int, int]:
    """Bytes of each way to write up to `k` positions among `numel` entries.

    Bitmap: ceil(n / 8). Low parts of w bytes: w k + ceil((k + (n - 1) // 256^w) / 8). int32: 4 k.
    """
    parts = {low: low * k + -(-(k + max(numel - 1, 0) // 256**low) // 8) for low in (1, 2)}
    return {BITMAP: -(-numel // 8), **parts, INT32: 4 * k}


@cache
def way(numel: int, k: int) -> int:
    """The shortest way; of equal ones the first."""
    found = sizes(numel, k)
    return min(found, key=lambda each: found[each])


@cache
def nbytes(numel: int, k: int) -> int:
    """How many bytes up to `k` positions among `numel` entries take."""
    return sizes(numel, k)[way(numel, k)]


def pack_positions(index: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """Write rising positions (int32), at most `k`, to `packed`: uint8, `nbytes(numel, k)`."""
    if index.is_meta:
        warm_up(warming())
    elif way(numel, k) != INT32 and fits(packed):
        half("places").pack(address(index), index.numel(), k, way(numel, k), address(packed), packed.numel())
    elif not (
        way(numel, k) != INT32
        and on_triton(packed)
        and by_triton("positions.pack", index, k, way(numel, k), packed)
    ):
        pack_positions_torch(index, numel, k, packed)


def unpack_positions(packed: Tensor, numel: int, k: int, room: Tensor | None = None) -> Tensor:
    """The positions, int32. Compiled code writes them to `room`, of k + 1 places, where it is given.

    On a device they are `k`, of which those that the payload lacks are -1.
    """
    if packed.is_meta:
        return packed.new_empty(k, dtype=torch.int32)
    expect(packed, "positions", nbytes(numel, k), torch.uint8, numel)
    low = way(numel, k)
    if not on_host(packed):
        return _unpack_on_device(packed, numel, k)
    if low == INT32 or not fits(packed):
        return unpack_positions_torch(packed, numel, k)
    index = torch.empty(k + 1, dtype=torch.int32) if room is None else room
    return index[: half("places").unpack(address(packed), packed.numel(), k, low, address(index))]


def scatter_add_(index: Tensor, values: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to `out` (flat) at the positions, of which none stands twice.

    On a device what stands at positions that are not in `out` is left out: the host looks at none of them.

    Raises:
        PayloadError: on the CPU, a position is not in `out`. Nothing is added then.
    """
    if out.is_meta:
        return
    expect(values, "entries", index.numel(), out.dtype, out.numel())
    if fits32(values, out):
        places, count, numel = half("places"), index.numel(), out.numel()
        outside = places.scatter(address(index), count, address(values), weight, address(out), numel)
    elif fits(values, out):
        array = out.detach().numpy()
        outside = half("places").scatter64(index.numpy(), values.numpy(), array.dtype.type(weight), array)
    elif not on_host(out):
        _scatter_on_device_(index, values, out, weight)
        return
    else:
        outside = _outside(index, out.numel())
        if not outside:
            out.index_add_(0, index, values, alpha=weight)
    if outside:
        raise PayloadError(
            f"{outside} positions of a peer are not among {out.numel()} entries: its payload is not of such "
            "a tensor"
        )


def _outside(index: Tensor, numel: int) -> int:
    low, high = index.aminmax() if index.numel() else (index.new_zeros(()), index.new_zeros(()))
    if int(low) < 0 or int(high) >= max(numel, 1):
        return int(((index < 0) | (index >= numel)).sum())
    return 0


def clear_(index: Tensor, out: Tensor) -> None:
    """Zero `out` (flat) at the positions; on a device, at those that are in it."""
    if fits32(out) and index.dtype == torch.int32:
        half("places").clear(address(index), index.numel(), address(out), out.numel())
    elif not (out.is_meta or on_host(out)):
        _clear_on_device_(index, out)
    else:
        out.index_fill_(0, index.long(), 0.0)


# ---- the reference, in plain torch --------------------------------------------------------------------


def pack_positions_torch(index: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """The reference: `pack_positions`, equal to the last bit."""
    low = way(numel, k)
    packed.zero_()
    if low == INT32:
        whole = torch.full((k,), -1, dtype=torch.int32, device=index.device)
        whole[: index.numel()] = index
        packed.copy_(whole.view(torch.uint8))
        return
    places = index.long()
    for byte in range(low):
        packed[byte * k : byte * k + index.numel()] = (places >> 8 * byte) & 255
    if low:
        places = (places >> 8 * low) + torch.arange(index.numel(), device=index.device)
    row = packed[low * k :]
    bits = torch.zeros(8 * row.numel(), dtype=torch.uint8, device=index.device)
    bits.index_fill_(0, places, 1)
    for bit in range(8):
        row |= bits[bit::8] << bit


def unpack_positions_torch(packed: Tensor, numel: int, k: int) -> Tensor:
    """The reference: `unpack_positions`, equal to the last bit."""
    low = way(numel, k)
    if low == INT32:
        whole = packed.clone().view(torch.int32)
        return whole[whole >= 0]
    row = packed[low * k :]
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    places = ((row[:, None] >> shifts) & 1).view(-1).nonzero().view(-1)[:k]
    if low:
        places = (places - torch.arange(places.numel(), device=packed.device)) << 8 * low
    for byte in range(low):
        places += packed[byte * k : byte * k + places.numel()].long() << 8 * byte
    return places.to(torch.int32)


# ---- on a device: the host waits for nothing ----------------------------------------------------------


def _unpack_on_device(packed: Tensor, numel: int, k: int) -> Tensor:
    low = way(numel, k)
    if low == INT32:
        return packed.clone().view(torch.int32)
    index = torch.full((k,), -1, dtype=torch.int32, device=packed.device)
    if on_triton(packed) and by_triton("positions.unpack", packed, k, low, index):
        return index
    return unpack_on_device_torch(packed, low, k)


def unpack_on_device_torch(packed: Tensor, low: int, k: int) -> Tensor:
    """`unpack_positions` in plain torch: `k` positions, of which -1 stands for those that are not there."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = ((packed[low * k :, None] >> shifts) & 1).view(-1)
    number = torch.arange(k, device=packed.device)
    places = torch.searchsorted(bits.cumsum(0), number + 1)
    there = places < bits.numel()
    if low:
        places = (places - number) << 8 * low
    for byte in range(low):
        places += packed[byte * k : (byte + 1) * k].long() << 8 * byte
    return torch.where(there, places, -1).to(torch.int32)


def _scatter_on_device_(index: Tensor, values: Tensor, out: Tensor, weight: float) -> None:
    if fits_triton32(values, out) and by_triton("positions.scatter", index, values, weight, out):
        return
    if index.numel() and out.numel():
        inside = (index >= 0) & (index < out.numel())
        out.index_add_(0, torch.where(inside, index, 0), torch.where(inside, values, 0.0), alpha=weight)


def _clear_on_device_(index: Tensor, out: Tensor) -> None:
    """What is outside writes to the first entry what this is to be anyway."""
    if fits_triton(out) and by_triton("positions.clear", index, out):
        return
    if index.numel() and out.numel():
        inside = (index >= 0) & (index < out.numel())
        first = torch.where((index == 0).any(), 0.0, out[0])
        out.index_copy_(0, torch.where(inside, index, 0).long(), torch.where(inside, 0.0, first))
