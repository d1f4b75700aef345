"""The Triton versions of `select`: exactly the k largest, of all entries or of each chunk of them.

Of all: magnitudes are ranked by their bits, 8 at a time, from the highest on: a pass counts how many there
are of each kind, and all programs of the next one work out from these counts in which kind the k-th largest
lies. Then pieces are counted, and write what is chosen behind what the pieces before them chose. The host
waits for none of it, and does the same whatever the entries are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.cuda.launch import jitted, start
from tacit.kernels.cuda.pieces import put, rank, summed

PIECE, WARPS = 4096, 8
"""Entries that one program looks at, and the warps that do."""
LEVELS = 4
BINS, FEW = tl.constexpr(256), tl.constexpr(256)
"""Kinds that are counted at a time; and up to how many entries of a piece are counted one by one."""


@jitted
def looked(
    x: tensor, residual: tensor, numel: tensor, PIECE: tl.constexpr, OWES: tl.constexpr
) -> tensor:  # fmt: skip
    """Where this program's piece begins; places in it, which of them there are, and the entries there."""
    begin, inside = tl.program_id(0).to(tl.int64) * PIECE, tl.arange(0, PIECE)
    mask = inside < numel - begin
    return begin, inside, mask, summed(x + begin, residual + begin, inside, mask, OWES)


@jitted
def picked(counts: tensor, state: tensor, k: tensor, LEVEL: tl.constexpr) -> tensor:
    """The k-th largest rank's bits down to this level's, whose counts are whole; and which of those it is.

    Written to `state`, for the levels below.
    """
    bits: tl.constexpr = 7 if LEVEL == 3 else 8
    prefix, left = 0, k
    if LEVEL > 0:
        prefix, left = tl.load(state + 2 * LEVEL), tl.load(state + 2 * LEVEL + 1)
    kinds = tl.arange(0, BINS)
    count = tl.load(counts + LEVEL * BINS + kinds)
    larger = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
    hit = (larger < left) & (larger + count >= left)
    prefix = (prefix << bits) | tl.sum(tl.where(hit, kinds, 0), axis=0)
    left -= tl.sum(tl.where(hit, larger, 0), axis=0)
    first = tl.program_id(0) == 0
    tl.store(state + 2 * LEVEL + 2, prefix, first)
    tl.store(state + 2 * LEVEL + 3, left, first)
    return prefix, left


@jitted
def tally_kernel(
    x: tensor, residual: tensor, new_residual: tensor, counts: tensor, state: tensor, numel: tensor, k:
    tensor,
    PIECE: tl.constexpr, LEVEL: tl.constexpr, OWES: tl.constexpr,
) -> None:  # fmt: skip
    """Count the kinds at this level, of those that are the k-th largest's above it. The first adds, too."""
    bits: tl.constexpr = 7 if LEVEL == 3 else 8
    shift: tl.constexpr = 23 - 8 * LEVEL if LEVEL < 3 else 0
    begin, inside, mask, a = looked(x, residual, numel, PIECE, OWES)
    if OWES:
        put(new_residual + begin, inside, a, mask)
    of_all = rank(a)
    if LEVEL > 0:
        prefix, _ = picked(counts, state, k, LEVEL - 1)
        mask = mask & ((of_all >> (shift + bits)) == prefix)
    kind = (of_all >> shift) & ((1 << bits) - 1)
    number = tl.sum(mask.to(tl.int32), axis=0)
    if number > FEW:
        count = tl.histogram(kind, BINS, mask)
        tl.atomic_add(counts + LEVEL * BINS + tl.arange(0, BINS), count, count > 0, sem="relaxed")
    elif number > 0:
        tl.atomic_add(counts + LEVEL * BINS + kind, 1, mask, sem="relaxed")


@jitted
def split_kernel(
    x: tensor, counts: tensor, state: tensor, ends: tensor, numel: tensor, pieces: tensor, k: tensor,
    PIECE: tl.constexpr, LEVEL: tl.constexpr,
) -> None:  # fmt: skip
    """How many of each piece are larger than the k-th largest, and how many are equal."""
    _, _, mask, a = looked(x, x, numel, PIECE, False)
    least, _ = picked(counts, state, k, LEVEL)
    of_all = rank(a)
    tl.store(ends + tl.program_id(0), tl.sum((mask & (of_all > least)).to(tl.int32), axis=0))
    tl.store(ends + pieces + tl.program_id(0), tl.sum((mask & (of_all == least)).to(tl.int32), axis=0))


@jitted
def write_kernel(
    x: tensor, state: tensor, ends: tensor, index: tensor, values: tensor, new_residual: tensor, numel:
    tensor,
    pieces: tensor, PIECE: tl.constexpr, LEVEL: tl.constexpr, OWES: tl.constexpr,
) -> None:  # fmt: skip
    """Write what is larger, and the first of what is equal, in the order of positions; owe nothing of it."""
    piece = tl.program_id(0)
    begin, inside, mask, a = looked(x, x, numel, PIECE, False)
    least, left = tl.load(state + 2 * LEVEL + 2), tl.load(state + 2 * LEVEL + 3)
    of_all = rank(a)
    larger, equal = mask & (of_all > least), mask & (of_all == least)
    both = larger.to(tl.int32) + (equal.to(tl.int32) << 16)  # a piece has fewer than 2^15 of each
    total, before = tl.sum(both, axis=0), tl.cumsum(both, axis=0) - both
    larger_before = tl.load(ends + piece) - (total & 0xFFFF) + (before & 0xFFFF)
    equal_before = tl.load(ends + pieces + piece) - (total >> 16) + (before >> 16)
    kept = larger | (equal & (equal_before < left))
    at = larger_before + tl.minimum(equal_before, left)
    tl.store(index + at, begin.to(tl.int32) + inside, kept)
    put(values, at, a, kept)
    if OWES:
        put(new_residual + begin, inside, tl.where(kept, 0.0, a), kept)


def largest(
    x: Tensor, k: int, index: Tensor, values: Tensor, residual: Tensor | None, new_residual: Tensor | None
) -> None:
    """`select.select_largest`, to the first k places of `index` and `values`."""
    numel, pieces = x.numel(), triton.cdiv(x.numel(), PIECE)
    work = torch.zeros(LEVELS * BINS.value + 2 * LEVELS + 2, dtype=torch.int32, device=x.device)
    counts, state = work[: LEVELS * BINS.value], work[LEVELS * BINS.value :]
    given, a, has_feedback = (
        (x, new_residual, True) if residual is not None and new_residual is not None else (x, x, False)
    )
    for level in range(LEVELS):
        start(
            tally_kernel, pieces, x, given, residual if has_feedback else a, a, counts, state, numel, k,
            PIECE=PIECE, LEVEL=level, OWES=has_feedback and level == 0, num_warps=WARPS,
        )  # fmt: skip
        given = a
    ends = torch.empty((2, pieces), dtype=torch.int32, device=x.device)
    last = LEVELS - 1
    start(
        split_kernel, pieces, x, a, counts, state, ends, numel, pieces, k,
        PIECE=PIECE, LEVEL=last, num_warps=WARPS,
    )  # fmt: skip
    ends = ends.cumsum(1, dtype=torch.int32)
    start(
        write_kernel, pieces, x, a, state, ends, index, values, a, numel, pieces,
        PIECE=PIECE, LEVEL=last, OWES=has_feedback, num_warps=2 * WARPS,
    )  # fmt: skip


# ---- chunk by chunk -----------------------------------------------------------------------------------


@jitted
def chunks_kernel(
    x: tensor, residual: tensor, new_residual: tensor, index: tensor, values: tensor, numel: tensor, chunk:
    tensor,
    k: tensor, BLOCK: tl.constexpr, OWES: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk: its k-th largest rank bit by bit; then what is larger, and the first of what is equal."""
    begin, inside = tl.program_id(0).to(tl.int64) * chunk, tl.arange(0, BLOCK)
    mask = (inside < chunk) & (inside < numel - begin)
    a = summed(x + begin, residual + begin, inside, mask, OWES)
    of_all = tl.where(mask, rank(a), -1)
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
    tl.store(index + first + at, begin.to(tl.int32) + inside, kept)
    put(values + first, at, a, kept)
    if OWES:
        put(new_residual + begin, inside, tl.where(kept, 0.0, a), mask)


def in_chunks(
    x: Tensor, per_chunk: int, chunk: int, index: Tensor, values: Tensor, residual: Tensor | None,
    new_residual: Tensor | None,
) -> None:  # fmt: skip
    """`select.select_in_chunks`, to the first places of `index` and `values`."""
    has_feedback, block = residual is not None and new_residual is not None, triton.next_power_of_2(chunk)
    start(
        chunks_kernel, triton.cdiv(x.numel(), chunk), x, x, residual if has_feedback else x, new_residual if
        has_feedback else x, index, values, x.numel(), chunk, per_chunk,
        BLOCK=block, OWES=has_feedback, num_warps=max(1, block * WARPS // PIECE),
    )  # fmt: skip
