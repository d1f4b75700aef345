"""The Triton version of `signs`: pack, take means, keep what is owed; add any peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.cuda.launch import jitted, peers, start_by_rows
from tacit.kernels.cuda.pieces import capped, folded, negated

BLOCK = 512
LANES = tl.constexpr(BLOCK // 8)
SHARE = tl.constexpr(2.0**-9)


@jitted
def entries(x: tensor, residual: tensor, at: tensor, mask: tensor, OWES: tl.constexpr) -> tensor:
    """x, or x + residual."""
    a = tl.load(x + at, mask, 0.0)
    if OWES:
        a += tl.load(residual + at, mask, 0.0)
    return a


@jitted
def mean(shares: tensor, count: tensor) -> tensor:
    """A sum of shares as a mean over `count` entries; 0 over none."""
    return capped(shares * tl.div_rn(512.0, tl.maximum(count, 1).to(tl.float32)))


@jitted
def encode_kernel(
    x: tensor, residual: tensor, owed: tensor, bits: tensor, highs: tensor, lows: tensor,
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
        a = entries(x, residual, begin + j * LANES + i, mask, OWES)
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
        tl.store(lows + row, low, row < first + count)
    else:
        high = mean(folded(above, 6), size + row * 0)
        low = negated(high)
    tl.store(highs + row, high, row < first + count)
    byte = tl.zeros((ROWS, LANES), tl.int32)
    for j in tl.static_range(8):
        mask = there & (i < lanes) & (j * lanes + i < size)
        at = begin + j * lanes + i
        a = entries(x, residual, at, mask, OWES)
        byte |= ((a >= 0) & mask).to(tl.int32) << j
        if KEEP:
            tl.store(owed + at, a - tl.where(a >= 0, high[:, None], low[:, None]), mask)
        elif OWES:
            tl.store(owed + at, a, mask)
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
            total = tl.load(out + at, mask, 0.0)
        bits_at, highs_at, lows_at = bits, highs, lows
        for _ in range(peers):
            byte = tl.load(bits_at + wide * LANES + i, mask, 0).to(tl.int32)
            high = tl.load(highs_at + wide * stride, there, 0.0) * weight
            low = negated(high)
            if SPLIT:
                low = tl.load(lows_at + wide * stride, there, 0.0) * weight
            total += tl.where(((byte >> j) & 1) != 0, high, low)
            bits_at += bits_step
            highs_at += highs_step
            lows_at += lows_step
        tl.store(out + at, total, mask)


def encode(
    x: Tensor, residual: Tensor | None, owed: Tensor | None, bits: Tensor, highs: Tensor,
    lows: Tensor | None, keep: bool,
) -> None:  # fmt: skip
    """`signs.encode_signs`, and `encode_signs_owed` where there are `residual` and `owed`."""
    owes = residual is not None and owed is not None
    start_by_rows(
        encode_kernel, x, BLOCK, 8, x, residual if owes else x, owed if owes else x,
        bits, highs, highs if lows is None else lows, OWES=owes, SPLIT=lows is not None, KEEP=keep,
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
