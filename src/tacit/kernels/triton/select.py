"""`kernels.select` by Triton: the k largest of all entries, or of each chunk; and all that reach a threshold.

The k largest of all: a sample says which magnitude a little more than k entries reach. One pass over all
adds the residual and collects these candidates, piece by piece; the exact choice is made among them.
Magnitudes are ranked by their bits, 11, 10 and 10 of them at a time: a pass counts how many there are in each
bin, and all programs of the next one work out from these counts in which bin the k-th largest lies. Then each
piece counts what it selects, and writes that after what the pieces before it selected. Where the candidates
are too few or too many for their buffer, the same kernels take all entries in their place: that is decided on
the device, so that the host waits for nothing, and the choice is exact whatever the entries are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.entry_buffers import (
    RUN,
    EntryBuffer,
    Selection,
    buffer_size,
    first_of,
    new_buffer,
    sample_rank,
    sample_size,
    sample_step,
)
from tacit.kernels.reference import select as reference
from tacit.kernels.select import chunked
from tacit.kernels.triton.launch import jit, launch
from tacit.kernels.triton.primitives import load, load_sum, magnitude_rank, store

PIECE, WARPS = 2048, 8
"""Entries that a program works on at a time, and its warps: of more it has no registers for others beside."""
COLLECTING, COUNTING = 1056, 264
"""Programs that collect candidates, and that count them, at most."""
LARGEST_CHUNK = 1 << 14
"""The largest chunk that one program holds."""
LEVELS, BINS = 3, (2048, 1024, 1024)
"""How often bins are counted, and how many each time: 31 bits of a rank."""
FEW, SOME, RUN_OF_SAMPLE = tl.constexpr(8), tl.constexpr(256), tl.constexpr(RUN)
"""Up to how many entries of a piece are counted one by one; and how many are chosen from at a time.

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
    BITS: tl.constexpr = 11 if LEVEL == 0 else 10
    BEGIN: tl.constexpr = 0 if LEVEL == 0 else 1024 + 1024 * LEVEL
    prefix, left = 0, k
    if LEVEL > 0:
        prefix, left = tl.load(state + 2 * LEVEL), tl.load(state + 2 * LEVEL + 1)
    bins = tl.arange(0, 1 << BITS)
    count = tl.load(counts + BEGIN + bins)
    larger = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
    hit = (larger < left) & (larger + count >= left)
    prefix = (prefix << BITS) | tl.sum(tl.where(hit, bins, 0), axis=0)
    left -= tl.sum(tl.where(hit, larger, 0), axis=0)
    first = tl.program_id(0) == 0
    tl.store(state + 2 * LEVEL + 2, prefix, first)
    tl.store(state + 2 * LEVEL + 3, left, first)
    return prefix, left


@jit
def count_bins(
    of_all: tensor, mask: tensor, prefix: tensor, count: tensor, counts: tensor, LEVEL: tl.constexpr
) -> tensor:
    """`count`, and the ranks whose bits above this level are `prefix`; a few go to `counts` at once."""
    BITS: tl.constexpr = 11 if LEVEL == 0 else 10
    BEGIN: tl.constexpr = 0 if LEVEL == 0 else 1024 + 1024 * LEVEL
    SHIFT: tl.constexpr = 20 - 10 * LEVEL
    if LEVEL > 0:
        mask = mask & ((of_all >> (SHIFT + BITS)) == prefix)
    bin_index = (of_all >> SHIFT) & ((1 << BITS) - 1)
    number = tl.sum(mask.to(tl.int32), axis=0)
    if number > FEW:
        count += tl.histogram(bin_index, 1 << BITS, mask)
    elif number > 0:
        tl.atomic_add(counts + BEGIN + bin_index, 1, mask, sem="relaxed")
    return count


@jit
def add_counts(count: tensor, counts: tensor, LEVEL: tl.constexpr) -> None:
    """Add a program's counts to those of all."""
    BITS: tl.constexpr = 11 if LEVEL == 0 else 10
    BEGIN: tl.constexpr = 0 if LEVEL == 0 else 1024 + 1024 * LEVEL
    tl.atomic_add(counts + BEGIN + tl.arange(0, 1 << BITS), count, count > 0, sem="relaxed")


@jit
def sample_kernel(
    x: tensor, residual: tensor, counts: tensor, state: tensor, size: tensor, step: tensor, k: tensor,
    PIECE: tl.constexpr, LEVEL: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Count this level's bins of a sample: runs of neighbours that begin `step` entries apart."""
    prefix = 0
    if LEVEL > 0:
        prefix, _ = kth_largest_bits(counts, state, k, LEVEL - 1)
    j = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    at = (j // RUN_OF_SAMPLE).to(tl.int64) * step + j % RUN_OF_SAMPLE
    mask = j < size
    of_all = magnitude_rank(load_sum(x, residual, at, mask, HAS_RESIDUAL))
    count = tl.zeros((2048 if LEVEL == 0 else 1024,), tl.int32)
    add_counts(count_bins(of_all, mask, prefix, count, counts, LEVEL), counts, LEVEL)


@jit
def threshold_kernel(counts: tensor, state: tensor, k: tensor) -> None:
    """The rank that the sample's k-th largest has, but for its lowest bits."""
    kth_largest_bits(counts, state, k, 1)


@jit
def collect_kernel(
    x: tensor, residual: tensor, new_residual: tensor, state: tensor, starts: tensor, positions: tensor,
    values: tensor, numel: tensor, pieces: tensor, capacity: tensor, PIECE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Add the residual, and collect what reaches the sample's k-th largest, to 2^-13; and where, by piece.

    The only pass over all entries. Pieces come in any order among the candidates: whoever is first.
    """
    least = tl.load(state + 4) << 10
    first = tl.program_id(0).to(tl.int64) * PIECE
    for begin in range(first, numel, tl.num_programs(0).to(tl.int64) * PIECE):
        inside, mask, a = load_piece(x, residual, numel, begin, PIECE, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            store(new_residual + begin, inside, a, mask)
        hit = (mask & (magnitude_rank(a) >= least)).to(tl.int32)
        number = tl.sum(hit, axis=0)
        start = number * 0
        if number > 0:
            start = tl.atomic_add(state, number, sem="relaxed")
            at = start + tl.cumsum(hit, axis=0) - 1
            put = (hit > 0) & (at < capacity)
            tl.store(positions + at, (begin + inside).to(tl.int32), put)
            store(values, at, a, put)
        tl.store(starts + begin // PIECE, start)
        tl.store(starts + pieces + begin // PIECE, number)


@jit
def fits(state: tensor, k: tensor, capacity: tensor) -> tensor:
    """Whether the k largest are among the candidates, all of which were collected; and how many they are."""
    number = tl.load(state)
    return (number >= k) & (number <= capacity), number


@jit
def count_kernel(
    a: tensor, values: tensor, found: tensor, counts: tensor, state: tensor, numel: tensor, k: tensor,
    capacity: tensor, PIECE: tl.constexpr, LEVEL: tl.constexpr,
) -> None:  # fmt: skip
    """Count this level's bins, of candidates in the k-th largest's bin above.

    Each program takes one piece after the other, and adds its counts to those of all once.
    """
    few, number = fits(found, k, capacity)
    length = tl.where(few, number, numel)
    first = tl.program_id(0).to(tl.int64) * PIECE
    if first < length:
        prefix = 0
        if LEVEL > 0:
            prefix, _ = kth_largest_bits(counts, state, k, LEVEL - 1)
        count = tl.zeros((2048 if LEVEL == 0 else 1024,), tl.int32)
        for begin in range(first, length, tl.num_programs(0).to(tl.int64) * PIECE):
            inside = tl.arange(0, PIECE)
            mask = inside < length - begin
            of_few, of_all = load(values + begin, inside, mask & few), load(a + begin, inside, mask & ~few)
            rank = magnitude_rank(tl.where(few, of_few, of_all))
            count = count_bins(rank, mask, prefix, count, counts, LEVEL)
        add_counts(count, counts, LEVEL)


@jit
def load_some(
    a: tensor, values: tensor, positions: tensor, few: tensor, start: tensor, begin: tensor, at: tensor,
    number: tensor,
) -> tensor:  # fmt: skip
    """Some candidates of a piece from its `at`-th on: which there are, their positions, and the entries."""
    inside = at + tl.arange(0, SOME)
    mask = inside < number
    of_few, of_all = load(values + start, inside, mask & few), load(a + begin, inside, mask & ~few)
    place = tl.where(few, tl.load(positions + start + inside, mask & few, 0), begin.to(tl.int32) + inside)
    return mask, place, tl.where(few, of_few, of_all)


@jit
def of_piece(
    found: tensor, starts: tensor, numel: tensor, pieces: tensor, k: tensor, capacity: tensor,
    PIECE: tl.constexpr,
) -> tensor:  # fmt: skip
    """Whether this program chooses from candidates; where they begin, where its piece does, how many."""
    piece = tl.program_id(0)
    few, _ = fits(found, k, capacity)
    begin = piece.to(tl.int64) * PIECE
    all_of = tl.minimum(numel - begin, PIECE).to(tl.int32)
    number = tl.where(few, tl.load(starts + pieces + piece), all_of)
    return few, tl.where(few, tl.load(starts + piece), 0), begin, number


@jit
def count_selected_kernel(
    a: tensor, values: tensor, positions: tensor, found: tensor, starts: tensor, counts: tensor,
    state: tensor, ends: tensor, numel: tensor, pieces: tensor, k: tensor, capacity: tensor,
    PIECE: tl.constexpr,
) -> None:  # fmt: skip
    """How many of each piece are larger than the k-th largest, and how many are equal."""
    few, start, begin, number = of_piece(found, starts, numel, pieces, k, capacity, PIECE)
    least, _left = kth_largest_bits(counts, state, k, 2)
    larger, equal = number * 0, number * 0
    for at in range(0, number, SOME):
        mask, _place, value = load_some(a, values, positions, few, start, begin, at, number)
        of_all = magnitude_rank(value)
        larger += tl.sum((mask & (of_all > least)).to(tl.int32), axis=0)
        equal += tl.sum((mask & (of_all == least)).to(tl.int32), axis=0)
    tl.store(ends + tl.program_id(0), larger)
    tl.store(ends + pieces + tl.program_id(0), equal)


@jit
def write_selected_kernel(
    a: tensor, values: tensor, positions: tensor, found: tensor, starts: tensor, state: tensor, ends: tensor,
    selected: tensor, selected_values: tensor, new_residual: tensor, numel: tensor, pieces: tensor, k: tensor,
    capacity: tensor, PIECE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Write what is larger, and the first of what is equal, in order; and zeros there to the residual."""
    few, start, begin, number = of_piece(found, starts, numel, pieces, k, capacity, PIECE)
    least, left = tl.load(state + 6), tl.load(state + 7)
    piece = tl.program_id(0)
    larger_before, equal_before = number * 0, number * 0
    if piece > 0:
        larger_before, equal_before = tl.load(ends + piece - 1), tl.load(ends + pieces + piece - 1)
    for at in range(0, number, SOME):
        mask, place, value = load_some(a, values, positions, few, start, begin, at, number)
        of_all = magnitude_rank(value)
        larger, equal = mask & (of_all > least), mask & (of_all == least)
        both = larger.to(tl.int32) + (equal.to(tl.int32) << 16)
        total, before = tl.sum(both, axis=0), tl.cumsum(both, axis=0) - both
        equals = equal_before + (before >> 16)
        kept = larger | (equal & (equals < left))
        to = larger_before + (before & 0xFFFF) + tl.minimum(equals, left)
        tl.store(selected + to, place, kept)
        store(selected_values, to, value, kept)
        if HAS_RESIDUAL:
            store(new_residual, place, tl.zeros((SOME,), tl.float32), kept)
        larger_before += total & 0xFFFF
        equal_before += total >> 16


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
    size, step = sample_size(numel, 1), max(RUN, sample_step(numel, 1))
    wanted, capacity = sample_rank(numel, k, size), buffer_size(numel, k)
    found = new_buffer(x, k)
    per_level, per_state = sum(BINS), 2 * LEVELS + 2
    work = torch.zeros(2 * (per_level + per_state), dtype=torch.int32, device=x.device)
    sampled, counts, of_sample, state = work.split_with_sizes([per_level, per_level, per_state, per_state])
    starts, ends = torch.empty((2, 2, pieces), dtype=torch.int32, device=x.device)
    before, a, has_residual = (
        (residual, new_residual, True) if residual is not None and new_residual is not None else (x, x, False)
    )
    for level in range(2):
        launch(
            sample_kernel, triton.cdiv(size, PIECE), x, x, before, sampled, of_sample, size, step, wanted,
            PIECE=PIECE, LEVEL=level, HAS_RESIDUAL=has_residual, num_warps=WARPS,
        )  # fmt: skip
    launch(threshold_kernel, 1, x, sampled, of_sample, wanted, num_warps=WARPS)
    launch(
        collect_kernel, min(pieces, COLLECTING), x, x, before, a, of_sample, starts, *found,
        numel, pieces, capacity, PIECE=PIECE, HAS_RESIDUAL=has_residual, num_warps=WARPS,
    )  # fmt: skip
    for level in range(LEVELS):
        launch(
            count_kernel, min(pieces, COUNTING), x, a, found.values, of_sample, counts, state, numel, k,
            capacity, PIECE=PIECE, LEVEL=level, num_warps=WARPS,
        )  # fmt: skip
    chosen = found.values, found.positions, of_sample, starts
    launch(
        count_selected_kernel, pieces, x, a, *chosen, counts, state, ends, numel, pieces, k, capacity,
        PIECE=PIECE, num_warps=2,
    )  # fmt: skip
    ends = ends.cumsum(1, dtype=torch.int32)
    launch(
        write_selected_kernel, pieces, x, a, *chosen, state, ends, positions, values, a, numel, pieces, k,
        capacity, PIECE=PIECE, HAS_RESIDUAL=has_residual, num_warps=2,
    )  # fmt: skip


# ---- chunk by chunk -----------------------------------------------------------------------------------


@jit
def chunks_kernel(
    x: tensor, residual: tensor, new_residual: tensor, positions: tensor, values: tensor, numel: tensor,
    chunk: tensor, k: tensor, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk: a rank that k entries reach, or its k-th largest; then what is larger, and the first equal.

    What lies between is cut in three, from four octaves below the largest on, until just k entries reach the
    lower end: of numbers that differ it takes 8 cuts or so where 31 bits are to be known.
    """
    begin, inside = tl.program_id(0).to(tl.int64) * chunk, tl.arange(0, BLOCK)
    mask = (inside < chunk) & (inside < numel - begin)
    a = load_sum(x + begin, residual + begin, inside, mask, HAS_RESIDUAL)
    of_all = tl.where(mask, magnitude_rank(a), -1)
    reached = tl.minimum(chunk, (numel - begin).to(tl.int32))
    wanted = tl.minimum(k, reached)
    low, high = wanted * 0, tl.max(of_all, axis=0) + 1
    first = high - (4 << 23)
    while (high - low > 1) & (reached != wanted):
        third = tl.maximum((high - low) // 3, 1)
        one = tl.where(first > low, first, low + third)
        other = tl.minimum(tl.where(first > low, first + (high - first) // 2, one + third), high)
        first = low
        both = tl.sum((of_all >= one).to(tl.int32) + ((of_all >= other).to(tl.int32) << 15), axis=0)
        at_one, at_other = both & 0x7FFF, both >> 15
        low = tl.where(at_other >= wanted, other, tl.where(at_one >= wanted, one, low))
        high = tl.where(at_other >= wanted, high, tl.where(at_one >= wanted, other, one))
        reached = tl.where(at_other >= wanted, at_other, tl.where(at_one >= wanted, at_one, reached))
    kept = of_all >= low
    if reached != wanted:
        larger, equal = of_all > low, of_all == low
        left = wanted - tl.sum(larger.to(tl.int32), axis=0)
        kept = larger | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    at, first_of = tl.cumsum(kept.to(tl.int32), axis=0) - 1, tl.program_id(0).to(tl.int64) * k
    tl.store(positions + first_of + at, begin.to(tl.int32) + inside, kept)
    store(values + first_of, at, a, kept)
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
        BLOCK=block, HAS_RESIDUAL=has_residual, num_warps=min(32, max(1, block * WARPS // PIECE)),
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
