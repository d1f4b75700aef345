"""`kernels.select` by Triton: the k largest of all entries, or of each chunk; and all that reach a threshold.

The k largest of all: magnitudes are ranked by their bits, 8 at a time, from the highest on. A pass counts how
many there are in each bin, and all programs of the next pass work out from these counts in which bin the k-th
largest lies. Then each piece counts what it selects, and writes that after what the pieces before it
selected. The host waits for none of it, and does the same whatever the entries are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.entry_buffers import EntryBuffer, Selection, first_of, new_buffer
from tacit.kernels.reference import select as reference
from tacit.kernels.select import chunked
from tacit.kernels.triton.launch import jit, launch
from tacit.kernels.triton.primitives import load_sum, magnitude_rank, store

PIECE, WARPS = 4096, 8
"""Entries that a program works on at a time, and its warps."""
COUNTING = 1024
"""Programs that count, at most: each adds to the same few bins, one after the other."""
LARGEST_CHUNK = 1 << 14
"""The largest chunk that one program holds."""
LEVELS = 4
BINS, FEW = tl.constexpr(256), tl.constexpr(8)
"""Bins that are counted at a time; and up to how many entries of a piece are counted one by one.

One by one, all programs wait for each other at the same few bins.
"""


@jit
def load_piece(
    x: tensor, residual: tensor, numel: tensor, begin: tensor, PIECE: tl.constexpr, HAS_RESIDUAL: tl.constexpr
) -> tensor:  # fmt: skip
    """Indices in the piece that begins there, which of them are entries, and the entries."""
    inside = tl.arange(0, PIECE)
    mask = inside < numel - begin
    return inside, mask, load_sum(x + begin, residual + begin, inside, mask, HAS_RESIDUAL)


@jit
def kth_largest_bits(counts: tensor, state: tensor, k: tensor, LEVEL: tl.constexpr) -> tensor:
    """The k-th largest rank's bits down to this level, whose counts are complete; and which of those it is.

    Written to `state`, for the levels below.
    """
    bits: tl.constexpr = 7 if LEVEL == 3 else 8
    prefix, left = 0, k
    if LEVEL > 0:
        prefix, left = tl.load(state + 2 * LEVEL), tl.load(state + 2 * LEVEL + 1)
    bins = tl.arange(0, BINS)
    count = tl.load(counts + LEVEL * BINS + bins)
    larger = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
    hit = (larger < left) & (larger + count >= left)
    prefix = (prefix << bits) | tl.sum(tl.where(hit, bins, 0), axis=0)
    left -= tl.sum(tl.where(hit, larger, 0), axis=0)
    first = tl.program_id(0) == 0
    tl.store(state + 2 * LEVEL + 2, prefix, first)
    tl.store(state + 2 * LEVEL + 3, left, first)
    return prefix, left


@jit
def count_kernel(
    x: tensor, residual: tensor, new_residual: tensor, counts: tensor, state: tensor, numel: tensor,
    k: tensor, PIECE: tl.constexpr, LEVEL: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Count this level's bins, of entries in the k-th largest's bin above. The first level adds.

    Each program takes one piece after the other, and adds its counts to those of all once.
    """
    bits: tl.constexpr = 7 if LEVEL == 3 else 8
    shift: tl.constexpr = 23 - 8 * LEVEL if LEVEL < 3 else 0
    prefix = 0
    if LEVEL > 0:
        prefix, _ = kth_largest_bits(counts, state, k, LEVEL - 1)
    count = tl.zeros((BINS,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * PIECE
    for begin in range(first, numel, tl.num_programs(0).to(tl.int64) * PIECE):
        inside, mask, a = load_piece(x, residual, numel, begin, PIECE, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            store(new_residual + begin, inside, a, mask)
        of_all = magnitude_rank(a)
        if LEVEL > 0:
            mask = mask & ((of_all >> (shift + bits)) == prefix)
        bin_index = (of_all >> shift) & ((1 << bits) - 1)
        number = tl.sum(mask.to(tl.int32), axis=0)
        if number > FEW:
            count += tl.histogram(bin_index, BINS, mask)
        elif number > 0:
            tl.atomic_add(counts + LEVEL * BINS + bin_index, 1, mask, sem="relaxed")
    tl.atomic_add(counts + LEVEL * BINS + tl.arange(0, BINS), count, count > 0, sem="relaxed")


@jit
def count_selected_kernel(
    x: tensor, counts: tensor, state: tensor, ends: tensor, numel: tensor, pieces: tensor, k: tensor,
    PIECE: tl.constexpr, LEVEL: tl.constexpr,
) -> None:  # fmt: skip
    """How many of each piece are larger than the k-th largest, and how many are equal."""
    _, mask, a = load_piece(x, x, numel, tl.program_id(0).to(tl.int64) * PIECE, PIECE, False)
    least, _ = kth_largest_bits(counts, state, k, LEVEL)
    of_all = magnitude_rank(a)
    tl.store(ends + tl.program_id(0), tl.sum((mask & (of_all > least)).to(tl.int32), axis=0))
    tl.store(ends + pieces + tl.program_id(0), tl.sum((mask & (of_all == least)).to(tl.int32), axis=0))


@jit
def write_selected_kernel(
    x: tensor, state: tensor, ends: tensor, positions: tensor, values: tensor, new_residual: tensor,
    numel: tensor, pieces: tensor, PIECE: tl.constexpr, LEVEL: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Write what is larger, and the first of what is equal, in order; and zeros there to the residual."""
    piece = tl.program_id(0)
    begin = piece.to(tl.int64) * PIECE
    inside, mask, a = load_piece(x, x, numel, begin, PIECE, False)
    least, left = tl.load(state + 2 * LEVEL + 2), tl.load(state + 2 * LEVEL + 3)
    of_all = magnitude_rank(a)
    larger, equal = mask & (of_all > least), mask & (of_all == least)
    both = larger.to(tl.int32) + (equal.to(tl.int32) << 16)  # a piece has fewer than 2^15 of each
    total, before = tl.sum(both, axis=0), tl.cumsum(both, axis=0) - both
    larger_before = tl.load(ends + piece) - (total & 0xFFFF) + (before & 0xFFFF)
    equal_before = tl.load(ends + pieces + piece) - (total >> 16) + (before >> 16)
    kept = larger | (equal & (equal_before < left))
    at = larger_before + tl.minimum(equal_before, left)
    tl.store(positions + at, begin.to(tl.int32) + inside, kept)
    store(values, at, a, kept)
    if HAS_RESIDUAL:
        store(new_residual + begin, inside, tl.where(kept, 0.0, a), kept)


def select_largest(
    x: Tensor, k: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None, look: Callable[[], None] | None = None,
) -> Selection:  # fmt: skip
    """See `kernels.select`."""
    buffer = buffer or new_buffer(x, k)
    if k:
        _select_largest(x, k, *buffer, residual, new_residual)
    if look is not None:
        look()
    return first_of(buffer, k)


def _select_largest(
    x: Tensor, k: int, positions: Tensor, values: Tensor, residual: Tensor | None, new_residual: Tensor | None
) -> None:
    numel, pieces = x.numel(), triton.cdiv(x.numel(), PIECE)
    work = torch.zeros(LEVELS * BINS.value + 2 * LEVELS + 2, dtype=torch.int32, device=x.device)
    counts, state = work[: LEVELS * BINS.value], work[LEVELS * BINS.value :]
    given, a, has_residual = (
        (x, new_residual, True) if residual is not None and new_residual is not None else (x, x, False)
    )
    for level in range(LEVELS):
        launch(
            count_kernel, min(pieces, COUNTING), x, given, residual if has_residual else a, a, counts, state,
            numel, k,
            PIECE=PIECE, LEVEL=level, HAS_RESIDUAL=has_residual and level == 0, num_warps=WARPS,
        )  # fmt: skip
        given = a
    ends = torch.empty((2, pieces), dtype=torch.int32, device=x.device)
    last = LEVELS - 1
    launch(
        count_selected_kernel, pieces, x, a, counts, state, ends, numel, pieces, k,
        PIECE=PIECE, LEVEL=last, num_warps=WARPS,
    )  # fmt: skip
    ends = ends.cumsum(1, dtype=torch.int32)
    launch(
        write_selected_kernel, pieces, x, a, state, ends, positions, values, a, numel, pieces,
        PIECE=PIECE, LEVEL=last, HAS_RESIDUAL=has_residual, num_warps=2 * WARPS,
    )  # fmt: skip


# ---- chunk by chunk -----------------------------------------------------------------------------------


@jit
def chunks_kernel(
    x: tensor, residual: tensor, new_residual: tensor, positions: tensor, values: tensor, numel: tensor,
    chunk: tensor, k: tensor, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk: its k-th largest rank bit by bit; then what is larger, and the first of what is equal."""
    begin, inside = tl.program_id(0).to(tl.int64) * chunk, tl.arange(0, BLOCK)
    mask = (inside < chunk) & (inside < numel - begin)
    a = load_sum(x + begin, residual + begin, inside, mask, HAS_RESIDUAL)
    of_all = tl.where(mask, magnitude_rank(a), -1)
    wanted = tl.minimum(k, (numel - begin).to(tl.int32))
    least = 0
    for bit in range(31):
        more = least | (1 << (30 - bit))
        reached = tl.sum((of_all >= more).to(tl.int32), axis=0)
        least = tl.where(reached >= wanted, more, least)
    larger, equal = of_all > least, of_all == least
    left = wanted - tl.sum(larger.to(tl.int32), axis=0)
    kept = larger | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    at, first = tl.cumsum(kept.to(tl.int32), axis=0) - 1, tl.program_id(0).to(tl.int64) * k
    tl.store(positions + first + at, begin.to(tl.int32) + inside, kept)
    store(values + first, at, a, kept)
    if HAS_RESIDUAL:
        store(new_residual + begin, inside, tl.where(kept, 0.0, a), mask)


def select_in_chunks(
    x: Tensor, per_chunk: int, chunk: int, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """See `kernels.select`."""
    if chunk > LARGEST_CHUNK:
        return reference.select_in_chunks(x, per_chunk, chunk, buffer, residual, new_residual)
    has_residual, block = residual is not None and new_residual is not None, triton.next_power_of_2(chunk)
    before, after = (residual, new_residual) if has_residual else (x, x)
    launch(
        chunks_kernel, triton.cdiv(x.numel(), chunk), x, x, before, after, *buffer,
        x.numel(), chunk, per_chunk,
        BLOCK=block, HAS_RESIDUAL=has_residual, num_warps=max(1, block * WARPS // PIECE),
    )  # fmt: skip
    return first_of(buffer, chunked(x.numel(), per_chunk, chunk))


# ---- all that reach a threshold -----------------------------------------------------------------------


@jit
def load_threshold_piece(
    x: tensor, residual: tensor, numel: tensor, threshold: tensor, PIECE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> tensor:  # fmt: skip
    """Indices, which of them are entries, the entries, and which reach the threshold; NaN does not."""
    place = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    mask = place < numel
    a = tl.load(x + place, mask, 0.0)
    if HAS_RESIDUAL:
        a += tl.load(residual + place, mask, 0.0)
    return place, mask, a, (tl.abs(a) >= threshold) & mask


@jit
def count_reaching_kernel(
    x: tensor, residual: tensor, counts: tensor, numel: tensor, threshold: tensor, PIECE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """How many entries of each piece reach the threshold."""
    _, _, _, hit = load_threshold_piece(x, residual, numel, threshold, PIECE, HAS_RESIDUAL)
    tl.store(counts + tl.program_id(0), tl.sum(hit.to(tl.int32), axis=0))


@jit
def write_reaching_kernel(
    x: tensor, residual: tensor, new_residual: tensor, ends: tensor, positions: tensor, values: tensor,
    numel: tensor, threshold: tensor, PIECE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Write what reaches it after that of the pieces before, and what is left to `new_residual`."""
    piece = tl.program_id(0)
    place, mask, a, hit = load_threshold_piece(x, residual, numel, threshold, PIECE, HAS_RESIDUAL)
    found = tl.cumsum(hit.to(tl.int32), axis=0)
    end = tl.load(ends + piece)
    at = end - tl.sum(hit.to(tl.int32), axis=0) + found - 1
    tl.store(positions + at, place.to(tl.int32), hit)
    tl.store(values + at, a, hit)
    if HAS_RESIDUAL:
        tl.store(new_residual + place, tl.where(hit, 0.0, a), mask)


def select_reaching(
    x: Tensor, threshold: float, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection | None:  # fmt: skip
    """See `kernels.select`; where the buffer is too small nothing is written.

    Two passes read x + residual, one to count and one to write; in between the host waits for the count.
    """
    has_residual = residual is not None and new_residual is not None
    before, after = (residual, new_residual) if has_residual else (x, x)
    pieces = -(-x.numel() // PIECE)
    counts = torch.zeros(pieces, dtype=torch.int32, device=x.device)
    launch(
        count_reaching_kernel, pieces, x, x, before, counts, x.numel(), threshold,
        PIECE=PIECE, HAS_RESIDUAL=has_residual,
    )  # fmt: skip
    ends = counts.cumsum(0)
    found = int(ends[-1]) if pieces else 0
    if found > buffer.positions.numel():
        return None
    launch(
        write_reaching_kernel, pieces, x, x, before, after, ends, *buffer, x.numel(), threshold,
        PIECE=PIECE, HAS_RESIDUAL=has_residual,
    )  # fmt: skip
    return first_of(buffer, found)
