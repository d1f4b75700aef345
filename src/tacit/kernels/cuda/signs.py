"""The Triton version of `signs`: pack, take means, keep what is owed; add any peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.cuda.launch import jitted, peers, start, start_by_rows
from tacit.kernels.cuda.pieces import capped, folded, negated, put, real, rounded, summed

BLOCK = 512
LANES = tl.constexpr(BLOCK // 8)
SHARE = tl.constexpr(2.0**-9)
PAIRED, HALVINGS = 1024, 10
"""Means that one program adds up, by so many halvings."""


@jitted
def mean(shares: tensor, count: tensor) -> tensor:
    """A sum of shares as a mean over `count` entries; 0 over none."""
    return capped(shares * tl.div_rn(512.0, tl.maximum(count, 1).to(tl.float32)))


@jitted
def encode_kernel(
    x: tensor, residual: tensor, new_residual: tensor, bits: tensor, highs: tensor, lows: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, OWES: tl.constexpr, SPLIT: tl.constexpr, KEEP: tl.constexpr,
) -> None:  # fmt: skip
    """Sums go down 64 lanes, whatever the size of the block, and bits by `lanes`: so x is read again."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < first + count)[:, None]
    begin, i = row.to(tl.int64)[:, None] * (8 * LANES), tl.arange(0, LANES)[None, :]
    above, below = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    positive = tl.zeros((ROWS, LANES), tl.int32)
    for j in tl.static_range(8):
        mask = there & (j * LANES + i < size)
        a = summed(x, residual, begin + j * LANES + i, mask, OWES)
        if SPLIT:
            up = a >= 0
            above += tl.where(up, a * SHARE, 0.0)
            below += tl.where(up, 0.0, -(a * SHARE))
            positive += (up & mask).to(tl.int32)
        else:
            above += tl.abs(a * SHARE)
    if SPLIT:
        number = tl.sum(positive, axis=1)
        high, low = mean(folded(above, 6), number), negated(mean(folded(below, 6), size - number))
        put(lows, row, low, row < first + count)
    else:
        high = mean(folded(above, 6), size + row * 0)
        low = negated(high)
    put(highs, row, high, row < first + count)
    byte = tl.zeros((ROWS, LANES), tl.int32)
    for j in tl.static_range(8):
        mask = there & (i < lanes) & (j * lanes + i < size)
        at = begin + j * lanes + i
        a = summed(x, residual, at, mask, OWES)
        byte |= ((a >= 0) & mask).to(tl.int32) << j
        if KEEP:
            put(new_residual, at, a - rounded(tl.where(a >= 0, high[:, None], low[:, None]), x), mask)
        elif OWES:
            put(new_residual, at, a, mask)
    tl.store(bits + row.to(tl.int64)[:, None] * LANES + i, byte, there & (i < lanes))


@jitted
def add_kernel(
    bits: tensor, highs: tensor, lows: tensor, out: tensor, bits_step: tensor, highs_step: tensor,
    lows_step: tensor, peers: tensor, stride: tensor, weight: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer says, in their order."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < first + count)[:, None]
    wide, i = row.to(tl.int64)[:, None], tl.arange(0, LANES)[None, :]
    for j in tl.static_range(8):
        mask = there & (i < lanes) & (j * lanes + i < size)
        at = wide * (8 * LANES) + j * lanes + i
        total = tl.zeros((ROWS, LANES), tl.float32)
        if not FRESH:
            total = real(out, at, mask)
        bits_at, highs_at, lows_at = bits, highs, lows
        for _ in range(peers):
            byte = tl.load(bits_at + wide * LANES + i, mask, 0).to(tl.int32)
            high = rounded(rounded(real(highs_at, wide * stride, there), out) * weight, out)
            low = negated(high)
            if SPLIT:
                low = rounded(rounded(real(lows_at, wide * stride, there), out) * weight, out)
            total = rounded(total + tl.where(((byte >> j) & 1) != 0, high, low), out)
            bits_at += bits_step
            highs_at += highs_step
            lows_at += lows_step
        put(out, at, total, mask)


def encode(
    x: Tensor, residual: Tensor | None, new_residual: Tensor | None, bits: Tensor, highs: Tensor,
    lows: Tensor | None, keep: bool,
) -> None:  # fmt: skip
    """`signs.encode_signs`, and `encode_signs_owed` where there are `residual` and `owed`."""
    has_feedback = residual is not None and new_residual is not None
    start_by_rows(
        encode_kernel, x, BLOCK, 8, x, residual if has_feedback else x, new_residual if has_feedback else x,
        bits, highs, highs if lows is None else lows, OWES=has_feedback, SPLIT=lows is not None, KEEP=keep,
    )  # fmt: skip


@jitted
def paired(means: tensor, count: tensor, SIZE: tl.constexpr, HALVINGS: tl.constexpr) -> tensor:
    """The sum of this program's SIZE numbers, in fp64, neighbours first."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(means + at, at < count, 0.0).to(tl.float64)
    for j in tl.static_range(HALVINGS):
        total = tl.sum(total.reshape(SIZE >> (j + 1), 2), axis=1)
    return tl.sum(total, axis=0)  # of one


@jitted
def paired_kernel(
    means: tensor, sums: tensor, count: tensor, SIZE: tl.constexpr, HALVINGS: tl.constexpr
) -> None:  # fmt: skip
    """One number for each SIZE."""
    tl.store(sums + tl.program_id(0), paired(means, count, SIZE, HALVINGS))


@jitted
def overall_kernel(
    sums: tensor, last: tensor, magnitude: tensor, count: tensor, numel: tensor, missing: tensor,
    SIZE: tl.constexpr, HALVINGS: tl.constexpr,
) -> None:  # fmt: skip
    """The mean of all entries, by one program; so many are `missing` in the last block."""
    less = tl.load(last).to(tl.float64) * tl.cast(missing, tl.float64)
    mean = (paired(sums, count, SIZE, HALVINGS) * (8.0 * LANES) - less) / tl.cast(numel, tl.float64)
    tl.store(magnitude, mean.to(tl.float32))


def encode_one(
    x: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    bits: Tensor,
    means: Tensor,
    magnitude: Tensor,
) -> None:
    """`signs.encode_sign`, and `encode_sign_owed` where there are `residual` and `owed`."""
    encode(x, residual, new_residual, bits, means, None, keep=False)
    if not x.numel():
        magnitude.zero_()
        return
    overall(means, x.numel(), magnitude)
    if new_residual is not None:
        add([(bits, magnitude, None)], -1.0, new_residual, fresh=False)


def overall(means: Tensor, numel: int, magnitude: Tensor) -> None:
    """`signs.overall_torch`."""
    sums = means
    while sums.numel() > PAIRED:
        fewer = torch.empty(-(-sums.numel() // PAIRED), dtype=torch.float64, device=means.device)
        start(paired_kernel, fewer.numel(), means, sums, fewer, sums.numel(), SIZE=PAIRED, HALVINGS=HALVINGS)
        sums = fewer
    missing = means.numel() * BLOCK - numel
    start(
        overall_kernel, 1, means, sums, means[-1:], magnitude, sums.numel(), numel, missing,
        SIZE=PAIRED, HALVINGS=HALVINGS,
    )  # fmt: skip


def add(payloads: Sequence[Sequence[Tensor | None]], weight: float, out: Tensor, fresh: bool) -> None:
    """`signs.add_signs_`."""
    for run in peers(payloads):
        bits, highs, lows = run.first
        assert highs is not None
        start_by_rows(
            add_kernel, out, BLOCK, 8, bits, highs, highs if lows is None else lows, out, *run.steps,
            run.number, min(1, highs.numel() - 1), weight, SPLIT=lows is not None, FRESH=fresh,
        )  # fmt: skip
        fresh = False
