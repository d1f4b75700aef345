"""The compiled half of `signs`: pack, take means, keep what is owed, in one pass; add any peers in one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled, inlined
from tacit.kernels.parts import HUGE
from tacit.kernels.pointers import bytes_at, float32_at, floats_at
from tacit.kernels.vectors import (
    LANES,
    SIZE,
    all_bytes,
    floats,
    folded,
    load_bytes,
    load_floats,
    magnitude,
    pick,
    population,
    store,
)

BLOCK, PLANES = 512, 8
SHARE = np.float32(2.0**-9)
"""Magnitudes are added up as shares of a full block: their sum cannot overflow."""
ZERO, NONE = np.float32(0), np.uint8(0)


@inlined
def mean(shares: Any, count: Any) -> Any:
    """A sum of shares as a mean over `count` entries; 0 over none."""
    return min(shares * (np.float32(BLOCK) / np.float32(max(count, 1))), HUGE)


@inlined
def taken(x: Any, residual: Any, new_residual: Any, at: Any) -> Any:
    """64 entries of x + residual, which are also written to `owed`; without `residual`, of x."""
    a = load_floats(x + at)
    if residual:
        a = a + load_floats(residual + at)
        store(new_residual + at, a)
    return a


@inlined
def one_mean(x: Any, residual: Any, new_residual: Any, at: Any, bits: Any, size: Any) -> Any:
    """Signs of a block, and its mean magnitude."""
    total, signs, share = floats(ZERO), all_bytes(NONE), floats(SHARE)
    for plane in range(PLANES):
        a = taken(x, residual, new_residual, at + plane * SIZE)
        signs = signs | pick(a >= floats(ZERO), all_bytes(np.uint8(1 << plane)), all_bytes(NONE))
        total = total + magnitude(a) * share
    store(bits, signs)
    return mean(folded(total), size)


@inlined
def two_means(x: Any, residual: Any, new_residual: Any, at: Any, bits: Any, size: Any) -> Any:
    """Signs of a block, the mean of its entries that are not negative, and that of those that are."""
    above, below, signs, share = floats(ZERO), floats(ZERO), all_bytes(NONE), floats(SHARE)
    count = np.int64(0)
    for plane in range(PLANES):
        a = taken(x, residual, new_residual, at + plane * SIZE)
        up = a >= floats(ZERO)
        signs = signs | pick(up, all_bytes(np.uint8(1 << plane)), all_bytes(NONE))
        part = magnitude(a) * share
        above = above + pick(up, part, floats(ZERO))
        below = below + pick(up, floats(ZERO), part)
        count += population(up)
    store(bits, signs)
    count -= BLOCK - size  # what a short block was filled up with
    return mean(folded(above), count), -mean(folded(below), size - count)


@inlined
def subtracted(at: Any, high: Any, low: Any) -> None:
    """Take away what the signs say of 64 entries."""
    a = load_floats(at)
    store(at, a - pick(a >= floats(ZERO), floats(high), floats(low)))


@inlined
def encoded(
    x: Any,
    residual: Any,
    new_residual: Any,
    at: Any,
    bits: Any,
    b: Any,
    highs: Any,
    lows: Any,
    keep: Any,
    size: Any,
) -> None:
    """The block `b` at the addresses."""
    if lows:
        high, low = two_means(x, residual, new_residual, at, bits, size)
        floats_at(lows, b, 1)[0] = low
    else:
        high = one_mean(x, residual, new_residual, at, bits, size)
        low = -high
    floats_at(highs, b, 1)[0] = high
    if keep:
        for plane in range(PLANES):
            subtracted(new_residual + at + plane * SIZE, high, low)


@inlined
def repacked(bits: Any, size: Any, out: Any) -> None:
    """The signs of a short block, in fewer lanes."""
    lanes = out.shape[0]
    out[:] = 0
    for i in range(size):
        bit = (bits[i % LANES] >> (i // LANES)) & 1
        out[i % lanes] |= np.uint8(bit << (i // lanes))


def _encode(
    x: Any, residual: Any, new_residual: Any, numel: Any, bits: Any, highs: Any, lows: Any, keep: Any
) -> None:
    """See `signs`: addresses; 0 for no `residual`, and none owed then, or for no `lows`."""
    whole = numel // BLOCK
    for b in range(whole):
        encoded(x, residual, new_residual, b * BLOCK * 4, bits + b * LANES, b, highs, lows, keep, BLOCK)
    rest = numel - whole * BLOCK
    if rest:
        room, signs = np.zeros((3, BLOCK), np.float32), np.empty(LANES, np.uint8)
        begin = whole * BLOCK
        room[0, :rest] = floats_at(x, begin, rest)
        if residual:
            room[1, :rest] = floats_at(residual, begin, rest)
        at = room.ctypes.data
        before = at + 4 * BLOCK if residual else np.uint64(0)
        encoded(at, before, at + 8 * BLOCK, 0, signs.ctypes.data, whole, highs, lows, keep, rest)
        if residual:
            floats_at(new_residual, begin, rest)[:] = room[2, :rest]
        repacked(signs, rest, bytes_at(bits, whole * LANES, (rest + 7) >> 3))


def _overall(means: Any, numel: Any, magnitude: Any) -> None:
    """The mean of all blocks, neighbours first; see `signs.overall_torch`."""
    count = (numel + BLOCK - 1) // BLOCK
    each, done = floats_at(means, 0, count), np.zeros(64, np.float64)
    for i in range(count):
        total, left, level = np.float64(each[i]), i, 0
        while left & 1:
            total = done[level] + total
            left >>= 1
            level += 1
        done[level] = total
    total, left, level = np.float64(0), count, 0
    while left:
        if left & 1:
            total = done[level] + total
        left >>= 1
        level += 1
    last = np.float64(each[count - 1]) * (count * BLOCK - numel) if count else np.float64(0)
    floats_at(magnitude, 0, 1)[0] = np.float32((total * BLOCK - last) / max(numel, 1))


def _encode_one(
    x: Any, residual: Any, new_residual: Any, numel: Any, bits: Any, means: Any, magnitude: Any
) -> None:
    """`_encode` with the mean magnitude of all, which is known only at the end: then it is subtracted."""
    _ENCODE(x, residual, new_residual, numel, bits, means, 0, False)
    _OVERALL(means, numel, magnitude)
    if residual:
        high = float32_at(magnitude, 0)
        whole = numel // LANES
        for i in range(whole):
            subtracted(new_residual + i * SIZE, high, -high)
        rest = floats_at(new_residual, whole * LANES, numel - whole * LANES)
        for i in range(rest.shape[0]):
            rest[i] -= high if rest[i] >= 0 else -high


@inlined
def chosen(bits: Any, high: Any, low: Any, out: Any) -> None:
    """Add one of two values to each entry of a short block."""
    lanes = bits.shape[0]
    for i in range(out.shape[0]):
        out[i] += high if (bits[i % lanes] >> (i // lanes)) & 1 else low


@inlined
def half_added(bits: Any, worth: Any, b: Any, first: Any, fresh: Any, at: Any) -> None:
    """Four planes of a block from the `first` on, what all peers say of them."""
    a0, a1, a2, a3 = floats(ZERO), floats(ZERO), floats(ZERO), floats(ZERO)
    if not fresh:
        a0, a1 = load_floats(at), load_floats(at + SIZE)
        a2, a3 = load_floats(at + 2 * SIZE), load_floats(at + 3 * SIZE)
    none = all_bytes(NONE)
    for peer in range(bits.shape[0]):
        signs = load_bytes(bits[peer] + b * LANES)
        high, low = floats(worth[peer, 0]), floats(worth[peer, 1])
        a0 = a0 + pick((signs & all_bytes(np.uint8(1 << first))) != none, high, low)
        a1 = a1 + pick((signs & all_bytes(np.uint8(2 << first))) != none, high, low)
        a2 = a2 + pick((signs & all_bytes(np.uint8(4 << first))) != none, high, low)
        a3 = a3 + pick((signs & all_bytes(np.uint8(8 << first))) != none, high, low)
    store(at, a0)
    store(at + SIZE, a1)
    store(at + 2 * SIZE, a2)
    store(at + 3 * SIZE, a3)


def _add(
    bits: Any, highs: Any, lows: Any, stride: Any, weight: Any, fresh: Any, out: Any, numel: Any
) -> None:
    """Add `weight` times what each peer says; its values are every `stride`-th, 0: the first alone."""
    worth = np.empty((bits.shape[0], 2), np.float32)
    whole = numel // BLOCK
    for b in range(whole + (numel > whole * BLOCK)):
        if b == 0 or stride:
            for peer in range(bits.shape[0]):
                worth[peer, 0] = float32_at(highs[peer], b * stride) * weight
                worth[peer, 1] = (
                    float32_at(lows[peer], b * stride) * weight if lows.shape[0] else -worth[peer, 0]
                )
        if b < whole:
            for first in range(0, PLANES, 4):
                half_added(bits, worth, b, first, fresh, out + (b * PLANES + first) * SIZE)
            continue
        rest = floats_at(out, b * BLOCK, numel - b * BLOCK)
        if fresh:
            rest[:] = 0
        for peer in range(bits.shape[0]):
            signs = bytes_at(bits[peer], b * LANES, (rest.shape[0] + 7) >> 3)
            chosen(signs, worth[peer, 0], worth[peer, 1], rest)


encode = _ENCODE = compiled(_encode, [f"void({'int64, ' * 7} boolean)"])
_OVERALL = compiled(_overall, ["void(int64, int64, int64)"])
encode_one = compiled(_encode_one, [f"void({', '.join(['int64'] * 7)})"])
add = compiled(_add, ["void(int64[::1], int64[::1], int64[::1], int64, float32, boolean, int64, int64)"])
