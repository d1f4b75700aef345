"""`kernels.signs` by Triton: signs, means and the residual; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.payloads import SignPayload
from tacit.kernels.triton.launch import jit, launch, launch_by_rows, payload_stacks
from tacit.kernels.triton.primitives import (
    MAGNITUDE,
    cap,
    load,
    load_sum,
    negate,
    round_to,
    store,
    sum_by_halves,
)

BLOCK = 512
LANES = tl.constexpr(BLOCK // 8)
SHARE = tl.constexpr(2.0**-9)
PER_PROGRAM, HALVINGS = 1024, 10
"""Means that one program adds up, and the halvings that this takes."""


@jit
def mean(shares: tensor, count: tensor) -> tensor:
    """A sum of shares as a mean over `count` entries; 0 over none."""
    return cap(shares * tl.div_rn(512.0, tl.maximum(count, 1).to(tl.float32)))


@jit
def encode_kernel(
    x: tensor, residual: tensor, new_residual: tensor, bits: tensor, highs: tensor, lows: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, SUBTRACT: tl.constexpr,
    KEEP_ZEROS: tl.constexpr,
) -> None:  # fmt: skip
    """Means go down 64 lanes, whatever the size of the block, and bits by `lanes`; so x is read twice."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < first + count)[:, None]
    begin, i = row.to(tl.int64)[:, None] * (8 * LANES), tl.arange(0, LANES)[None, :]
    above, below = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    positive, chosen = tl.zeros((ROWS, LANES), tl.int32), tl.zeros((ROWS, LANES), tl.int32)
    mixed, half = row < 0, row * 0
    if KEEP_ZEROS:
        for j in tl.static_range(8):
            mask = there & (j * LANES + i < size)
            a = load_sum(x, residual, begin + j * LANES + i, mask, HAS_RESIDUAL)
            second = j * LANES + i >= 4 * lanes
            above += tl.where(second, 0.0, tl.abs(a * SHARE))
            below += tl.where(second, tl.abs(a * SHARE), 0.0)
            chosen += ((a != 0) & mask).to(tl.int32)
        number = tl.sum(chosen, axis=1)
        mixed = (number > 0) & (number < size)
        half = (sum_by_halves(below, 6) > sum_by_halves(above, 6)).to(tl.int32)
        above, below = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
        chosen = tl.zeros((ROWS, LANES), tl.int32)
    for j in tl.static_range(8):
        mask = there & (j * LANES + i < size)
        a = load_sum(x, residual, begin + j * LANES + i, mask, HAS_RESIDUAL)
        if KEEP_ZEROS:
            waits = mixed[:, None] & ((j * LANES + i >= 4 * lanes) != (half != 0)[:, None])
            a = tl.where(waits, 0.0, a)
            mask &= (a != 0) | (mixed == 0)[:, None]
        if SPLIT:
            up = a >= 0
            above += tl.where(up, a * SHARE, 0.0)
            below += tl.where(up, 0.0, -(a * SHARE))
            positive += (up & mask).to(tl.int32)
        else:
            above += tl.abs(a * SHARE)
        chosen += mask.to(tl.int32)
    size_sent = tl.sum(chosen, axis=1)
    if SPLIT:
        number = tl.sum(positive, axis=1)
        high = mean(sum_by_halves(above, 6), number)
        low = negate(mean(sum_by_halves(below, 6), size_sent - number))
        store(lows, row, low, row < first + count)
    else:
        high = mean(sum_by_halves(above, 6), size_sent)
        low = negate(high)
    if KEEP_ZEROS:
        # The sign says that a half is sent, and the lowest bit which.
        pattern = high.to(tl.int32, bitcast=True)
        pattern = tl.where(mixed, (pattern & -2) | half, pattern)
        high = pattern.to(tl.float32, bitcast=True)
        if not SPLIT:
            low = negate(high)
        store(highs, row, tl.where(mixed, negate(high), high), row < first + count)
    else:
        store(highs, row, high, row < first + count)
    byte = tl.zeros((ROWS, LANES), tl.int32)
    for j in tl.static_range(8):
        mask = there & (i < lanes) & (j * lanes + i < size)
        at = begin + j * lanes + i
        a = load_sum(x, residual, at, mask, HAS_RESIDUAL)
        sent = mask
        if KEEP_ZEROS:
            sent &= (half[:, None] == j // 4) | (mixed == 0)[:, None]
            byte |= ((a != 0) & sent & mixed[:, None]).to(tl.int32) << (j ^ 4)
        byte |= ((a >= 0) & sent).to(tl.int32) << j
        if SUBTRACT:
            less = negate(round_to(tl.where(a >= 0, high[:, None], low[:, None]), x))
            if KEEP_ZEROS:
                less = tl.where(sent & ((a != 0) | (mixed == 0)[:, None]), less, 0.0)
            store(new_residual, at, a + less, mask)
        elif HAS_RESIDUAL:
            store(new_residual, at, a, mask)
    tl.store(bits + row.to(tl.int64)[:, None] * LANES + i, byte, there & (i < lanes))


@jit
def add_kernel(
    bits: tensor, highs: tensor, lows: tensor, out: tensor, bits_step: tensor, highs_step: tensor,
    lows_step: tensor, peers: tensor, stride: tensor, weight: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer sent, decoded, in order."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < first + count)[:, None]
    wide, i = row.to(tl.int64)[:, None], tl.arange(0, LANES)[None, :]
    for j in tl.static_range(8):
        mask = there & (i < lanes) & (j * lanes + i < size)
        at = wide * (8 * LANES) + j * lanes + i
        total = tl.zeros((ROWS, LANES), tl.float32)
        if not FRESH:
            total = load(out, at, mask)
        bits_at, highs_at, lows_at = bits, highs, lows
        for _ in range(peers):
            byte = tl.load(bits_at + wide * LANES + i, mask, 0).to(tl.int32)
            value = load(highs_at, wide * stride, there)
            pattern = value.to(tl.int32, bitcast=True)
            value = (pattern & MAGNITUDE).to(tl.float32, bitcast=True)
            sent = (pattern >= 0) | (((pattern & 1) == j // 4) & (((byte >> (j ^ 4)) & 1) != 0))
            high = round_to(round_to(value, out) * weight, out)
            low = negate(high)
            if SPLIT:
                low = round_to(round_to(load(lows_at, wide * stride, there), out) * weight, out)
            added = tl.where(((byte >> j) & 1) != 0, high, low)
            total = round_to(total + tl.where(sent, added, 0.0), out)
            bits_at += bits_step
            highs_at += highs_step
            lows_at += lows_step
        store(out, at, total, mask)


def encode_signs(
    x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None, keep_zeros: bool = False,
    residual: Tensor | None = None, new_residual: Tensor | None = None, subtract: bool = True,
) -> None:  # fmt: skip
    """See `kernels.signs`."""
    has_residual = residual is not None and new_residual is not None
    before, after = (residual, new_residual) if has_residual else (x, x)
    launch_by_rows(
        encode_kernel, x, BLOCK, 8, x, before, after, bits, highs, highs if lows is None else lows,
        HAS_RESIDUAL=has_residual, SPLIT=lows is not None, SUBTRACT=subtract and has_residual,
        KEEP_ZEROS=keep_zeros,
    )  # fmt: skip


@jit
def sum_pairs(means: tensor, count: tensor, SIZE: tl.constexpr, HALVINGS: tl.constexpr) -> tensor:
    """The sum of this program's SIZE numbers, in fp64, added pairwise."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(means + at, at < count, 0.0).to(tl.float64)
    for j in tl.static_range(HALVINGS):
        total = tl.sum(total.reshape(SIZE >> (j + 1), 2), axis=1)
    return tl.sum(total, axis=0)  # of one


@jit
def sum_pairs_kernel(
    means: tensor, sums: tensor, count: tensor, SIZE: tl.constexpr, HALVINGS: tl.constexpr
) -> None:  # fmt: skip
    """One sum for each SIZE numbers."""
    tl.store(sums + tl.program_id(0), sum_pairs(means, count, SIZE, HALVINGS))


@jit
def overall_mean_kernel(
    sums: tensor, last: tensor, magnitude: tensor, count: tensor, numel: tensor, missing: tensor,
    SIZE: tl.constexpr, HALVINGS: tl.constexpr,
) -> None:  # fmt: skip
    """The mean of all entries, by one program; `missing` entries fill the last block."""
    less = tl.load(last).to(tl.float64) * tl.cast(missing, tl.float64)
    mean = (sum_pairs(sums, count, SIZE, HALVINGS) * (8.0 * LANES) - less) / tl.cast(numel, tl.float64)
    tl.store(magnitude, mean.to(tl.float32))


def encode_sign(
    x: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """See `kernels.signs`."""
    encode_signs(x, bits, means, None, False, residual, new_residual, subtract=False)
    if not x.numel():
        magnitude.zero_()
        return
    overall_mean(means, x.numel(), magnitude)
    if new_residual is not None:
        add_signs_([(bits, magnitude, None)], -1.0, new_residual, fresh=False)


def overall_mean(means: Tensor, numel: int, magnitude: Tensor) -> None:
    """`reference.signs.overall_mean`."""
    sums = means
    while sums.numel() > PER_PROGRAM:
        fewer = torch.empty(-(-sums.numel() // PER_PROGRAM), dtype=torch.float64, device=means.device)
        launch(
            sum_pairs_kernel, fewer.numel(), means, sums, fewer, sums.numel(), SIZE=PER_PROGRAM,
            HALVINGS=HALVINGS,
        )  # fmt: skip
        sums = fewer
    missing = means.numel() * BLOCK - numel
    launch(
        overall_mean_kernel, 1, means, sums, means[-1:], magnitude, sums.numel(), numel, missing,
        SIZE=PER_PROGRAM, HALVINGS=HALVINGS,
    )  # fmt: skip


def add_signs_(payloads: Sequence[SignPayload], weight: float, out: Tensor, fresh: bool) -> None:
    """See `kernels.signs`."""
    for stack in payload_stacks(payloads):
        bits, highs, lows = stack.first
        assert highs is not None
        launch_by_rows(
            add_kernel, out, BLOCK, 8, bits, highs, highs if lows is None else lows, out, *stack.strides,
            stack.peers, min(1, highs.numel() - 1), weight, SPLIT=lows is not None, FRESH=fresh,
        )  # fmt: skip
        fresh = False
