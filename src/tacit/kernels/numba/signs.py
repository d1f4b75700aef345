"""`kernels.signs` by numba: signs, means and the residual in one pass; adds any peers in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.passes import load_and_fetch, load_sum, streams, write
from tacit.kernels.numba.pointers import bytes_at, float32_at, floats_at
from tacit.kernels.numba.primitives import LARGEST
from tacit.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    byte_vector,
    count_true,
    float_vector,
    load_bytes,
    load_floats,
    magnitude,
    settle,
    store,
    sum_by_halves,
    where,
)

BLOCK, PLANES = 512, 8
SHARE = np.float32(2.0**-9)
"""Magnitudes are added up as shares of a full block: their sum cannot overflow."""
ZERO, NONE = np.float32(0), np.uint8(0)


@inline
def mean(shares: Any, count: Any) -> Any:
    """A sum of shares as a mean over `count` entries; 0 over none."""
    return min(shares * (np.float32(BLOCK) / np.float32(max(count, 1))), LARGEST)


@inline
def load_and_keep(x: Any, residual: Any, total_at: Any, at: Any, past_caches: Any) -> Any:
    """64 entries of x + residual, which are also written to `total_at` unless that is 0."""
    if not total_at:
        return load_sum(x, residual, at)
    a = load_and_fetch(x, residual, at)
    write(total_at + at, a, past_caches)
    return a


@inline
def one_mean(x: Any, residual: Any, total_at: Any, at: Any, bits: Any, past_caches: Any, size: Any) -> Any:
    """Signs of a block, and its mean magnitude."""
    total, signs, share = float_vector(ZERO), byte_vector(NONE), float_vector(SHARE)
    for plane in range(PLANES):
        a = load_and_keep(x, residual, total_at, at + plane * VECTOR_BYTES, past_caches)
        signs = signs | where(a >= float_vector(ZERO), byte_vector(np.uint8(1 << plane)), byte_vector(NONE))
        total = total + magnitude(a) * share
    store(bits, signs)
    return mean(sum_by_halves(total), size)


@inline
def two_means(x: Any, residual: Any, total_at: Any, at: Any, bits: Any, past_caches: Any, size: Any) -> Any:
    """Signs of a block, the mean of its entries that are not negative, and that of those that are."""
    above, below = float_vector(ZERO), float_vector(ZERO)
    signs, share, count = byte_vector(NONE), float_vector(SHARE), np.int64(0)
    for plane in range(PLANES):
        a = load_and_keep(x, residual, total_at, at + plane * VECTOR_BYTES, past_caches)
        up = a >= float_vector(ZERO)
        signs = signs | where(up, byte_vector(np.uint8(1 << plane)), byte_vector(NONE))
        part = magnitude(a) * share
        above = above + where(up, part, float_vector(ZERO))
        below = below + where(up, float_vector(ZERO), part)
        count += count_true(up)
    store(bits, signs)
    count -= BLOCK - size  # the zeros that fill a short block
    return mean(sum_by_halves(above), count), -mean(sum_by_halves(below), size - count)


@inline
def without_signs(a: Any, high: Any, low: Any) -> Any:
    """64 entries less the value that their signs decode to."""
    return a - where(a >= float_vector(ZERO), float_vector(high), float_vector(low))


@inline
def encode_block(
    x: Any, residual: Any, new_residual: Any, at: Any, bits: Any, b: Any, highs: Any, lows: Any,
    subtract: Any, past_caches: Any, size: Any,
) -> None:  # fmt: skip
    """Encode block `b`, whose entries begin `at` bytes after the addresses."""
    total_at = np.int64(0) if subtract else new_residual
    if lows:
        high, low = two_means(x, residual, total_at, at, bits, past_caches, size)
        floats_at(lows, b, 1)[0] = low
    else:
        high = one_mean(x, residual, total_at, at, bits, past_caches, size)
        low = -high
    floats_at(highs, b, 1)[0] = high
    if subtract:
        for plane in range(PLANES):
            here = at + plane * VECTOR_BYTES
            rest = without_signs(load_and_fetch(x, residual, here), high, low)
            write(new_residual + here, rest, past_caches)


@inline
def repack_signs(bits: Any, size: Any, out: Any) -> None:
    """The signs of a short block, in fewer lanes."""
    lanes = out.shape[0]
    out[:] = 0
    for i in range(size):
        bit = (bits[i % LANES] >> (i // LANES)) & 1
        out[i % lanes] |= np.uint8(bit << (i // lanes))


def _encode(
    x: Any, residual: Any, new_residual: Any, numel: Any, bits: Any, highs: Any, lows: Any, subtract: Any
) -> None:
    """`signs.encode_signs` by address.

    `residual` is 0 where there is none, and `lows` where one value is enough. With `subtract` the decoded
    signs are subtracted from `new_residual`.
    """
    whole, past_caches = numel // BLOCK, streams(new_residual, numel)
    for b in range(whole):
        signs = bits + b * LANES
        encode_block(
            x, residual, new_residual, b * BLOCK * 4, signs, b, highs, lows, subtract, past_caches, BLOCK
        )
    settle()
    rest = numel - whole * BLOCK
    if rest:
        padded, short = np.zeros((3, BLOCK), np.float32), np.empty(LANES, np.uint8)
        begin = whole * BLOCK
        padded[0, :rest] = floats_at(x, begin, rest)
        if residual:
            padded[1, :rest] = floats_at(residual, begin, rest)
        at = padded.ctypes.data
        before = at + 4 * BLOCK if residual else np.uint64(0)
        encode_block(
            at, before, at + 8 * BLOCK, 0, short.ctypes.data, whole, highs, lows, subtract, False, rest
        )
        if residual:
            floats_at(new_residual, begin, rest)[:] = padded[2, :rest]
        repack_signs(short, rest, bytes_at(bits, whole * LANES, (rest + 7) >> 3))


def _overall(means: Any, numel: Any, magnitude: Any) -> None:
    """The mean of all entries, by those of the blocks, added pairwise; see `reference.signs.overall_mean`."""
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
    """`_encode` with one magnitude for all blocks, which is known only at the end, and is subtracted then."""
    _ENCODE(x, residual, new_residual, numel, bits, means, 0, False)
    _OVERALL(means, numel, magnitude)
    if residual:
        high = float32_at(magnitude, 0)
        whole = numel // LANES
        for i in range(whole):
            at = new_residual + i * VECTOR_BYTES
            store(at, without_signs(load_floats(at), high, -high))
        rest = floats_at(new_residual, whole * LANES, numel - whole * LANES)
        for i in range(rest.shape[0]):
            rest[i] -= high if rest[i] >= 0 else -high


@inline
def add_short_block(bits: Any, high: Any, low: Any, out: Any) -> None:
    """Add one of two values to each entry of a short block."""
    lanes = bits.shape[0]
    for i in range(out.shape[0]):
        out[i] += high if (bits[i % lanes] >> (i // lanes)) & 1 else low


@inline
def add_planes(bits: Any, values: Any, b: Any, first: Any, fresh: Any, at: Any, past_caches: Any) -> None:
    """Add what all peers sent of four planes (each 64 entries) of block `b`, from plane `first` on."""
    a0, a1, a2, a3 = float_vector(ZERO), float_vector(ZERO), float_vector(ZERO), float_vector(ZERO)
    if not fresh:
        a0, a1 = load_floats(at), load_floats(at + VECTOR_BYTES)
        a2, a3 = load_floats(at + 2 * VECTOR_BYTES), load_floats(at + 3 * VECTOR_BYTES)
    none = byte_vector(NONE)
    for peer in range(bits.shape[0]):
        signs = load_bytes(bits[peer] + b * LANES)
        high, low = float_vector(values[peer, 0]), float_vector(values[peer, 1])
        a0 = a0 + where((signs & byte_vector(np.uint8(1 << first))) != none, high, low)
        a1 = a1 + where((signs & byte_vector(np.uint8(2 << first))) != none, high, low)
        a2 = a2 + where((signs & byte_vector(np.uint8(4 << first))) != none, high, low)
        a3 = a3 + where((signs & byte_vector(np.uint8(8 << first))) != none, high, low)
    write(at, a0, past_caches)
    write(at + VECTOR_BYTES, a1, past_caches)
    write(at + 2 * VECTOR_BYTES, a2, past_caches)
    write(at + 3 * VECTOR_BYTES, a3, past_caches)


def _add(
    bits: Any, highs: Any, lows: Any, stride: Any, weight: Any, fresh: Any, out: Any, numel: Any
) -> None:
    """Add `weight` times each peer's values, in order. With `stride` 0 the first value is for all blocks."""
    values = np.empty((bits.shape[0], 2), np.float32)
    whole, past_caches = numel // BLOCK, fresh and streams(out, numel)
    for b in range(whole + (numel > whole * BLOCK)):
        if b == 0 or stride:
            for peer in range(bits.shape[0]):
                values[peer, 0] = float32_at(highs[peer], b * stride) * weight
                values[peer, 1] = (
                    float32_at(lows[peer], b * stride) * weight if lows.shape[0] else -values[peer, 0]
                )
        if b < whole:
            for first in range(0, PLANES, 4):
                at = out + (b * PLANES + first) * VECTOR_BYTES
                add_planes(bits, values, b, first, fresh, at, past_caches)
            continue
        rest = floats_at(out, b * BLOCK, numel - b * BLOCK)
        if fresh:
            rest[:] = 0
        for peer in range(bits.shape[0]):
            signs = bytes_at(bits[peer], b * LANES, (rest.shape[0] + 7) >> 3)
            add_short_block(signs, values[peer, 0], values[peer, 1], rest)
    settle()


encode = _ENCODE = compile_now(_encode, [f"void({'int64, ' * 7} boolean)"])
_OVERALL = compile_now(_overall, ["void(int64, int64, int64)"])
encode_one = compile_now(_encode_one, [f"void({', '.join(['int64'] * 7)})"])
add = compile_now(_add, ["void(int64[::1], int64[::1], int64[::1], int64, float32, boolean, int64, int64)"])
