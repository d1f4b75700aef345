"""`kernels.positions` by numba: pack, unpack, scatter and clear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.dispatch import arrays, columns
from tacit.kernels.entry_buffers import Selection
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.pointers import bytes_at, floats_at, ints_at
from tacit.kernels.numba.vectors import LANES, VECTOR_BYTES, load_floats, settle, stream
from tacit.kernels.payload_layout import INT32, position_format
from tacit.kernels.payloads import expect
from tacit.kernels.reference import positions as reference
from tacit.kernels.thread_scratch import thread_scratch

CACHED = 1 << 12
"""Entries that are zeroed and added to in the first-level cache."""


def _pack(places: Any, count: Any, k: Any, low: Any, target: Any, size: Any) -> None:
    """Write low parts of `low` bytes, byte by byte of all positions, and the bits after them. By address."""
    index, packed = ints_at(places, 0, count), bytes_at(target, 0, size)
    first = low * k
    shift = 8 * low
    packed[:] = 0
    for byte in range(low):
        for j in range(index.shape[0]):
            packed[byte * k + j] = np.uint8(index[j] >> (8 * byte))
    for j in range(index.shape[0]):
        place = (np.int64(index[j]) >> shift) + (j if low else 0)
        packed[first + (place >> 3)] |= np.uint8(1 << (place & 7))


def _unpack(source: Any, size: Any, k: Any, low: Any, places: Any) -> Any:
    """Write the positions, with room for one more than possible; returns their number. By address.

    Every bit is written as if it were set, and only set ones advance, so that no branch depends on it.
    """
    packed, index = bytes_at(source, 0, size), ints_at(places, 0, k + 1)
    found: Any = 0
    first = low * k
    for byte in range(packed.shape[0] - first):
        bits = np.int64(packed[first + byte])
        if bits == 0:
            continue
        for bit in range(8):
            place: Any = 8 * byte + bit
            position = place
            if low:
                position = ((place - found) << (8 * low)) | np.int64(packed[found])
                if low == 2:
                    position |= np.int64(packed[k + found]) << 8
            index[found] = position
            found += (bits >> bit) & 1
            if found > k:
                return k
    return found


@inline
def add_inside(index: Any, values: Any, weight: Any, out: Any) -> int:
    """Add `weight` times the values to `out`; how many positions are not in it: then nothing is added."""
    outside = 0
    size = np.uint32(out.shape[0])
    for j in range(index.shape[0]):
        if np.uint32(index[j]) >= size:
            outside += 1
    if outside == 0:
        for j in range(index.shape[0]):
            out[np.uint32(index[j])] += weight * values[j]
    return outside


def _scatter(index: Any, count: Any, values: Any, weight: Any, out: Any, numel: Any) -> int:
    """`add_inside`, of fp32, by address."""
    return add_inside(ints_at(index, 0, count), floats_at(values, 0, count), weight, floats_at(out, 0, numel))


def _scatter_all(
    places: Any, counts: Any, entries: Any, peers: Any, weight: Any, out: Any, numel: Any, fresh: Any
) -> bool:
    """Add `weight` times the values of each peer to the fp32 `out`, block by block.

    `places`, `counts` and `entries` are arrays of one number a peer; all else is by address. `fresh`: `out`
    is overwritten with zeros first.

    Returns:
        False if the positions of a peer do not rise, or are not in `out`: then nothing is written.
    """
    for peer in range(peers):
        index, last = ints_at(places[peer], 0, counts[peer]), np.int64(-1)
        for j in range(counts[peer]):
            if index[j] <= last:
                return False
            last = np.int64(index[j])
        if last >= numel:
            return False
    done = np.zeros(peers, np.int64)
    memory = np.empty(CACHED + LANES, np.float32)
    here = (memory.ctypes.data + 63) & ~63
    stop = np.int64(0)
    while stop < numel:
        start, before_line = stop, (-(out // 4) - stop) % 16
        stop = min(start + (before_line if before_line else CACHED), numel)
        streamed = fresh and stop - start == CACHED
        target = floats_at(here if streamed else out, 0 if streamed else start, stop - start)
        if fresh:
            target[:] = 0
        for peer in range(peers):
            j, count = done[peer], counts[peer]
            index, values = ints_at(places[peer], 0, count), floats_at(entries[peer], 0, count)
            while j < count and index[j] < stop:
                target[index[j] - start] += weight * values[j]
                j += 1
            done[peer] = j
        if streamed:
            for i in range(CACHED // LANES):
                stream(out + 4 * start + i * VECTOR_BYTES, load_floats(here + i * VECTOR_BYTES))
    settle()
    memory[0] = 0  # so that it lives as long as its address is used
    return True


def _clear(index: Any, count: Any, out: Any, numel: Any) -> None:
    """Zero the fp32 `out` at the positions that are in it. By address."""
    places, target = ints_at(index, 0, count), floats_at(out, 0, numel)
    for j in range(count):
        if np.uint32(places[j]) < np.uint32(numel):
            target[np.uint32(places[j])] = 0


def _scatter64(index: Any, values: Any, weight: Any, out: Any) -> int:
    """`add_inside`, of fp64."""
    return add_inside(index, values, weight, out)


_PACK = compile_now(_pack, ["void(int64, int64, int64, int64, int64, int64)"])
_UNPACK = compile_now(_unpack, ["int64(int64, int64, int64, int64, int64)"])
_SCATTER = compile_now(_scatter, ["int64(int64, int64, int64, float32, int64, int64)"])
_SCATTER_ALL = compile_now(
    _scatter_all, ["boolean(int64[::1], int64[::1], int64[::1], int64, float32, int64, int64, boolean)"]
)
_CLEAR = compile_now(_clear, ["void(int64, int64, int64, int64)"])
_SCATTER64 = compile_now(_scatter64, ["int64(int32[::1], float64[::1], float64, float64[::1])"])


def pack_positions(positions: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """See `kernels.positions`."""
    low = position_format(numel, k)
    if low == INT32:
        reference.pack_positions(positions, numel, k, packed)
        return
    _PACK(positions.data_ptr(), positions.numel(), k, low, packed.data_ptr(), packed.numel())


def unpack_all(
    packed: Sequence[Tensor], numel: int, k: int, buffers: Sequence[Tensor | None] | None = None
) -> Sequence[Tensor]:
    """See `kernels.positions`."""
    low, found = position_format(numel, k), []
    if low == INT32:
        return reference.unpack_all(packed, numel, k)
    if buffers is None:
        room = thread_scratch("index", len(packed) * (k + 1), torch.int32, packed[0].device)
        buffers = torch.split(room, k + 1)
    for each, given in zip(packed, buffers, strict=True):
        index = torch.empty(k + 1, dtype=torch.int32) if given is None else given
        found.append(index[: _UNPACK(each.data_ptr(), each.numel(), k, low, index.data_ptr())])
    return found


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float) -> int:
    """See `kernels.positions`."""
    if out.dtype == torch.float64:
        return int(_SCATTER64(*arrays(positions, values), weight, out.detach().numpy()))
    given = positions.data_ptr(), positions.numel(), values.data_ptr()
    return int(_SCATTER(*given, weight, out.data_ptr(), out.numel()))


def scatter_all_(peers: Sequence[Selection], out: Tensor, weight: float, fresh: bool) -> None:
    """See `kernels.positions`."""
    for there, what in peers:
        if what.numel() != there.numel() or what.dtype != out.dtype or not what.is_contiguous():
            expect(what, "entries", there.numel(), out.dtype, out.numel())
    if peers:
        places, values = columns(peers)
        counts = np.fromiter([there.numel() for there, _ in peers], np.int64, len(peers))
        if _SCATTER_ALL(places, counts, values, len(peers), weight, out.data_ptr(), out.numel(), fresh):
            return
    reference.scatter_all_(peers, out, weight, fresh)


def clear_(positions: Tensor, out: Tensor) -> None:
    """See `kernels.positions`."""
    _CLEAR(positions.data_ptr(), positions.numel(), out.data_ptr(), out.numel())
