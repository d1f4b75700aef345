"""`kernels.positions` by Triton: pack and unpack, scatter and clear."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.entry_buffers import Selection
from tacit.kernels.payload_layout import INT32, position_format
from tacit.kernels.reference import positions as reference
from tacit.kernels.triton.launch import jit, launch, payload_stacks
from tacit.kernels.triton.primitives import load, round_to, store

SIZE, BITS, TILE = 1024, 4096, 8192
"""Positions that one program writes, bits that one reads, and entries that one adds to, of all peers."""
PIVOTS, SOME, NONE = tl.constexpr(256), tl.constexpr(256), tl.constexpr(0x7FFFFFFF)
"""Positions that are looked at, and that are added, at a time."""


@jit
def pack_kernel(
    index: tensor, packed: tensor, words: tensor, count: tensor, k: tensor,
    SIZE: tl.constexpr, LOW: tl.constexpr,
) -> None:  # fmt: skip
    """Low parts byte by byte, and the bit of each position among words of zeros; nothing of negative ones."""
    j = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    place = tl.load(index + j, j < count, -1)
    there = place >= 0
    for byte in tl.static_range(LOW):
        part = tl.where(there, (place >> (8 * byte)) & 255, 0)
        tl.store(packed + byte * k + j, part.to(tl.uint8), j < count)
    if LOW > 0:
        place = (place >> (8 * LOW)) + j
    tl.atomic_or(words + (place >> 5), (j * 0 + 1) << (place & 31), there, sem="relaxed")


@jit
def bit_at(row: tensor, size: tensor, piece: tensor, BITS: tl.constexpr) -> tensor:
    """Indices, and the bit at each; 0 after the end."""
    place = piece * BITS + tl.arange(0, BITS)
    byte = tl.load(row + (place >> 3), (place >> 3) < size, 0).to(tl.int32)
    return place, (byte >> (place & 7)) & 1


@jit
def count_kernel(
    row: tensor, counts: tensor, size: tensor, step: tensor, pieces: tensor, BITS: tl.constexpr
) -> None:  # fmt: skip
    """How many bits of each piece of each peer are set."""
    peer, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    _, bit = bit_at(row + peer.to(tl.int64) * step, size, piece, BITS)
    tl.store(counts + tl.program_id(0), tl.sum(bit, axis=0))


@jit
def unpack_kernel(
    packed: tensor, row: tensor, ends: tensor, index: tensor, size: tensor, step: tensor, pieces: tensor,
    k: tensor, BITS: tl.constexpr, LOW: tl.constexpr,
) -> None:  # fmt: skip
    """The position of each bit that is set, of the first k of each peer."""
    peer, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    far = peer.to(tl.int64)
    packed, index = packed + far * step, index + far * k
    place, bit = bit_at(row + far * step, size, piece, BITS)
    j = tl.load(ends + tl.program_id(0)) - tl.sum(bit, axis=0) + tl.cumsum(bit, axis=0) - 1
    there = (bit != 0) & (j < k)
    if LOW > 0:
        place = (place - j) << (8 * LOW)
    for byte in tl.static_range(LOW):
        place |= tl.load(packed + byte * k + j, there, 0).to(tl.int32) << (8 * byte)
    tl.store(index + j, place, there)


@jit
def scatter_kernel(
    index: tensor, values: tensor, out: tensor, count: tensor, numel: tensor, weight: tensor,
    SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """No position stands twice, so nothing need be atomic; what is outside is left out."""
    j = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = j < count
    place = tl.load(index + j, there, 0)
    inside = there & (place >= 0) & (place < numel)
    factor = round_to(tl.zeros((SIZE,), tl.float32) + weight, out)
    product = round_to(factor * load(values, j, inside), out)
    store(out, place, load(out, place, inside) + product, inside)


@jit
def load_rising(positions: tensor, j: tensor, mask: tensor) -> tensor:
    """Positions, of which those that a payload lacks, -1 at the end, come last."""
    place = tl.load(positions + j, mask, -1)
    return tl.where(place < 0, NONE, place)


@jit
def first_from(positions: tensor, k: tensor, wanted: tensor) -> tensor:
    """How many of the rising positions are less than `wanted`."""
    low, high, i = k * 0, k, tl.arange(0, PIVOTS)
    while high - low > PIVOTS:
        step = (high - low + PIVOTS - 1) // PIVOTS
        last = low + (i + 1) * step - 1
        low += step * tl.sum((load_rising(positions, last, last < high) < wanted).to(tl.int32), axis=0)
        high = tl.minimum(high, low + step)
    return low + tl.sum((load_rising(positions, low + i, low + i < high) < wanted).to(tl.int32), axis=0)


@jit
def scatter_all_kernel(
    positions: tensor, values: tensor, out: tensor, positions_step: tensor, values_step: tensor,
    peers: tensor, k: tensor, numel: tensor, weight: tensor, TILE: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add what each peer has for this program's entries, in order: they stay in the caches meanwhile."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    end = tl.minimum(begin + TILE, numel)
    if FRESH:
        every = begin + tl.arange(0, TILE)
        store(out, every, tl.zeros((TILE,), tl.float32), every < end)
        tl.debug_barrier()
    factor = round_to(tl.zeros((SOME,), tl.float32) + weight, out)
    for _ in range(peers):
        stop = first_from(positions, k, end)
        for at in range(first_from(positions, k, begin), stop, SOME):
            j = at + tl.arange(0, SOME)
            place = tl.load(positions + j, j < stop, -1)
            inside = (place >= begin) & (place < end)
            product = round_to(factor * load(values, j, inside), out)
            store(out, place, load(out, place, inside) + product, inside)
        tl.debug_barrier()
        positions += positions_step
        values += values_step


@jit
def clear_kernel(index: tensor, out: tensor, count: tensor, numel: tensor, SIZE: tl.constexpr) -> None:
    """Zeros at the positions that are not outside."""
    j = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = j < count
    place = tl.load(index + j, there, 0)
    store(out, place, tl.zeros((SIZE,), tl.float32), there & (place >= 0) & (place < numel))


def pack_positions(index: Tensor, numel: int, k: int, packed: Tensor) -> None:
    """See `kernels.positions`."""
    low = position_format(numel, k)
    if low == INT32:
        reference.pack_positions(index, numel, k, packed)
        return
    row, count = packed[low * k :], index.numel()
    words = torch.zeros(triton.cdiv(row.numel(), 4), dtype=torch.int32, device=packed.device)
    if count < k:
        packed.zero_()
    launch(
        pack_kernel, triton.cdiv(count, SIZE), packed, index, packed, words, count, k, SIZE=SIZE, LOW=low,
    )  # fmt: skip
    row.copy_(words.view(torch.uint8)[: row.numel()])


def unpack_all(
    packed: Sequence[Tensor], numel: int, k: int, buffers: Sequence[Tensor | None] | None = None
) -> Sequence[Tensor]:
    """See `kernels.positions`.

    Of peers that lie at equal distances, as in a message, the launches are as many as of one.
    """
    low = position_format(numel, k)
    if low == INT32:
        return reference.unpack_all(packed, numel, k)
    index = torch.full((len(packed), k), -1, dtype=torch.int32, device=packed[0].device)
    done = 0
    for stack in payload_stacks([(each,) for each in packed]):
        first, some = stack.first[0], index[done : done + stack.peers]
        assert first is not None
        row = first[low * k :]
        pieces = triton.cdiv(8 * row.numel(), BITS)
        counts = torch.empty((stack.peers, pieces), dtype=torch.int32, device=first.device)
        (step,) = stack.strides
        launch(count_kernel, stack.peers * pieces, first, row, counts, row.numel(), step, pieces, BITS=BITS)
        ends = counts.cumsum(1, dtype=torch.int32)
        launch(
            unpack_kernel, stack.peers * pieces, first, first, row, ends, some, row.numel(), step, pieces, k,
            BITS=BITS, LOW=low,
        )  # fmt: skip
        done += stack.peers
    return index.unbind()


def scatter(index: Tensor, values: Tensor, out: Tensor, weight: float) -> int:
    """See `kernels.positions`."""
    programs = triton.cdiv(index.numel(), SIZE)
    launch(
        scatter_kernel, programs, out, index, values, out, index.numel(), out.numel(), weight, SIZE=SIZE,
    )  # fmt: skip
    return 0


def scatter_all_(peers: Sequence[Selection], out: Tensor, weight: float, fresh: bool) -> None:
    """See `kernels.positions`."""
    alike = len({each.positions.numel() for each in peers}) == 1
    for stack in payload_stacks(peers) if alike else [*chain(*(payload_stacks([each]) for each in peers))]:
        positions, values = stack.first
        assert positions is not None
        launch(
            scatter_all_kernel, triton.cdiv(out.numel(), TILE), out, positions, values, out, *stack.strides,
            stack.peers, positions.numel(), out.numel(), weight, TILE=TILE, FRESH=fresh,
        )  # fmt: skip
        fresh = False


def clear_(index: Tensor, out: Tensor) -> None:
    """See `kernels.positions`."""
    launch(
        clear_kernel, triton.cdiv(index.numel(), SIZE), out, index, out, index.numel(), out.numel(),
        SIZE=SIZE,
    )  # fmt: skip
