"""The compiled half of `signs`: pack, take means, keep what is owed, in one pass; add any peers in one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled, inlined
from tacit.kernels.parts import HUGE, folded
from tacit.kernels.pointers import bytes_at, float32_at

BLOCK, LANES = 512, 64
SHARE = np.float32(2.0**-9)
"""Magnitudes are added up as shares of a full block: their sum cannot overflow."""


@inlined
def summed(first: Any, second: Any, out: Any) -> None:
    """Entry by entry."""
    for i in range(out.shape[0]):
        out[i] = first[i] + second[i]


@inlined
def packed(piece: Any, lanes: Any, bits: Any) -> None:
    """One bit an entry: not negative."""
    if piece.shape[0] < 8 * lanes:
        bits[:] = 0
    for j in range(8):
        part = piece[j * lanes : (j + 1) * lanes]
        if j == 0:
            for i in range(part.shape[0]):
                bits[i] = np.uint8(part[i] >= 0)
        else:
            for i in range(part.shape[0]):
                bits[i] |= np.uint8(np.uint8(part[i] >= 0) << j)


@inlined
def magnitudes(piece: Any, partial: Any) -> Any:
    """The mean magnitude."""
    partial[:] = 0
    for start in range(0, piece.shape[0], LANES):
        part = piece[start : start + LANES]
        for i in range(part.shape[0]):
            partial[i] += abs(part[i]) * SHARE
    return mean(folded(partial), piece.shape[0])


@inlined
def mean(shares: Any, count: Any) -> Any:
    """A sum of shares as a mean over `count` entries; 0 over none."""
    return min(shares * (np.float32(BLOCK) / np.float32(max(count, 1))), HUGE)


@inlined
def two_means(piece: Any, above: Any, below: Any, counts: Any) -> Any:
    """The mean of the entries that are not negative, and that of those that are."""
    above[:] = 0
    below[:] = 0
    counts[:] = 0
    for start in range(0, piece.shape[0], LANES):
        part = piece[start : start + LANES]
        for i in range(part.shape[0]):
            share = part[i] * SHARE
            up = part[i] >= 0
            above[i] += share if up else np.float32(0)
            below[i] += np.float32(0) if up else -share
            counts[i] += np.int32(up)
    count = counts.sum()
    return mean(folded(above), count), -mean(folded(below), piece.shape[0] - count)


@inlined
def subtracted(piece: Any, high: Any, low: Any) -> None:
    """Take away what the bits say."""
    for i in range(piece.shape[0]):
        piece[i] -= high if piece[i] >= 0 else low


def _encode(
    x: Any, residual: Any, owed: Any, bits: Any, highs: Any, lows: Any, split: Any, keep: Any
) -> None:
    """See `signs`. Without error feedback `residual` is empty, and `owed` is `x`, which is left alone."""
    above, below = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    counts = np.empty(LANES, np.int32)
    for b in range(highs.shape[0]):
        begin, end = b * BLOCK, (b + 1) * BLOCK
        piece = owed[begin:end]
        if residual.shape[0]:
            summed(x[begin:end], residual[begin:end], piece)
        lanes = (piece.shape[0] + 7) >> 3
        packed(piece, lanes, bits[b * LANES : b * LANES + lanes])
        if split:
            highs[b], lows[b] = two_means(piece, above, below, counts)
        else:
            highs[b] = magnitudes(piece, above)
        if keep:
            subtracted(piece, highs[b], lows[b] if split else -highs[b])


@inlined
def chosen(bits: Any, high: Any, low: Any, lanes: Any, out: Any) -> None:
    """Add one of two values to each entry."""
    for j in range(8):
        target = out[j * lanes : (j + 1) * lanes]
        mask = np.uint8(1 << j)
        for i in range(target.shape[0]):
            target[i] += high if bits[i] & mask else low


def _add(bits: Any, highs: Any, lows: Any, stride: Any, weight: Any, fresh: Any, out: Any) -> None:
    """Add `weight` times what each peer says; its values are every `stride`-th, 0: the first alone."""
    for b in range((out.shape[0] + BLOCK - 1) // BLOCK):
        target = out[b * BLOCK : (b + 1) * BLOCK]
        lanes = (target.shape[0] + 7) >> 3
        if fresh:
            target[:] = 0
        for peer in range(bits.shape[0]):
            high = float32_at(highs[peer], b * stride) * weight
            low = float32_at(lows[peer], b * stride) * weight if lows.shape[0] else -high
            chosen(bytes_at(bits[peer], b * LANES, lanes), high, low, lanes, target)


encode = compiled(
    _encode,
    [f"void({'float32[::1], ' * 3} uint8[::1], {'float32[::1], ' * 2} boolean, boolean)"],
)
add = compiled(_add, ["void(int64[::1], int64[::1], int64[::1], int64, float32, boolean, float32[::1])"])
