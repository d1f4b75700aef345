"""`kernels.signs` by numba: signs, means and the residual in one pass; adds any peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import address, addresses
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.passes import load_and_fetch, load_sum, streams, write
from tacit.kernels.numba.pointers import bytes_at, float32_at, floats_at, ints_at
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
from tacit.kernels.payloads import SignPayload

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
    """Signs of a block, its mean magnitude, and whether an entry is 0."""
    total, signs, share = float_vector(ZERO), byte_vector(NONE), float_vector(SHARE)
    there = float_vector(SHARE) != float_vector(ZERO)
    for plane in range(PLANES):
        a = load_and_keep(x, residual, total_at, at + plane * VECTOR_BYTES, past_caches)
        signs = signs | where(a >= float_vector(ZERO), byte_vector(np.uint8(1 << plane)), byte_vector(NONE))
        total = total + magnitude(a) * share
        there = there & (a != float_vector(ZERO))
    store(bits, signs)
    return mean(sum_by_halves(total), size), count_true(there) < LANES


@inline
def two_means(x: Any, residual: Any, total_at: Any, at: Any, bits: Any, past_caches: Any, size: Any) -> Any:
    """Signs, the mean of entries that are not negative, that of those that are, and whether one is 0."""
    above, below = float_vector(ZERO), float_vector(ZERO)
    signs, share, count = byte_vector(NONE), float_vector(SHARE), np.int64(0)
    there = float_vector(SHARE) != float_vector(ZERO)
    for plane in range(PLANES):
        a = load_and_keep(x, residual, total_at, at + plane * VECTOR_BYTES, past_caches)
        up = a >= float_vector(ZERO)
        signs = signs | where(up, byte_vector(np.uint8(1 << plane)), byte_vector(NONE))
        part = magnitude(a) * share
        above = above + where(up, part, float_vector(ZERO))
        below = below + where(up, float_vector(ZERO), part)
        count += count_true(up)
        there = there & (a != float_vector(ZERO))
    store(bits, signs)
    count -= BLOCK - size  # the zeros that fill a short block
    return (
        mean(sum_by_halves(above), count),
        -mean(sum_by_halves(below), size - count),
        count_true(there) < LANES,
    )


@inline
def without_signs(a: Any, high: Any, low: Any) -> Any:
    """64 entries less the value that their signs decode to."""
    return a - where(a >= float_vector(ZERO), float_vector(high), float_vector(low))


@inline
def half_of_shares(at: Any) -> Any:
    """The sum of magnitudes of a block, as shares."""
    total = float_vector(ZERO)
    for plane in range(PLANES):
        total = total + magnitude(load_floats(at + plane * VECTOR_BYTES)) * float_vector(SHARE)
    return sum_by_halves(total)


@inline
def encode_half(
    x: Any, residual: Any, new_residual: Any, bits: Any, b: Any, highs: Any, lows: Any, subtract: Any,
    size: Any,
) -> Any:  # fmt: skip
    """Encode the short block `b` by the half with more magnitude; False if all entries are 0, or none."""
    lanes, low, there = (size + 7) >> 3, ZERO, np.zeros(2, np.int64)
    room = np.zeros((3, BLOCK), np.float32)
    for i in range(size):
        a = float32_at(x, i)
        if residual:
            a += float32_at(residual, i)
        upper = np.int64(i >= 4 * lanes)
        room[upper, i] = a
        there[upper] += a != 0
    if not 0 < there[0] + there[1] < size:
        return False
    settle()
    at, signs = room.ctypes.data, bytes_at(bits, 0, lanes)
    half = np.int64(half_of_shares(at + 4 * BLOCK) > half_of_shares(at))
    kept, trash, count = room[half], at + 8 * BLOCK, there[half]
    if lows:
        high, low, _ = two_means(at + half * 4 * BLOCK, 0, 0, 0, trash, False, count)
        floats_at(lows, b, 1)[0] = low
    else:
        high, _ = one_mean(at + half * 4 * BLOCK, 0, 0, 0, trash, False, count)
    floats_at(highs, b, 1)[0] = high
    ints_at(highs, b, 1)[0] = (ints_at(highs, b, 1)[0] & -2) | np.int32(half) | np.int32(-(2**31))
    high = np.float32(abs(float32_at(highs, b)))
    low = low if lows else -high
    signs[:] = 0
    for i in range(half * 4 * lanes, min(size, (half + 1) * 4 * lanes)):
        plane, a = i // lanes, kept[i]
        signs[i % lanes] |= np.uint8(((a >= 0) << plane) | ((a != 0) << (plane ^ 4)))
        kept[i] = a - (high if a >= 0 else low) if a != 0 else a
    if subtract:
        for i in range(size):
            floats_at(new_residual, i, 1)[0] = room[np.int64(i >= 4 * lanes), i] + ZERO
    return True


@inline
def sums_of_half(x: Any, residual: Any, at: Any, first: Any) -> Any:
    """Of four planes from `first` on: shares of all magnitudes, of those above and those below, and counts.

    The counts are of the entries that are not negative, and of those that are not 0.
    """
    total, above, below, zero = float_vector(ZERO), float_vector(ZERO), float_vector(ZERO), float_vector(ZERO)
    ups, count = np.int64(0), np.int64(0)
    for plane in range(first, first + PLANES // 2):
        a = load_sum(x, residual, at + plane * VECTOR_BYTES)
        up, part = a >= zero, magnitude(a) * float_vector(SHARE)
        total, above, below = total + part, above + where(up, part, zero), below + where(up, zero, part)
        ups += count_true(up)
        count += count_true(a != zero)
    return total, above, below, ups, count


@inline
def encode_half_block(
    x: Any, residual: Any, new_residual: Any, at: Any, bits: Any, b: Any, highs: Any, lows: Any,
    subtract: Any, past_caches: Any,
) -> Any:  # fmt: skip
    """`encode_half` of a whole block, whose halves are four planes each; False if all entries are 0."""
    total, above, below, ups, count = sums_of_half(x, residual, at, 0)
    total1, above1, below1, ups1, count1 = sums_of_half(x, residual, at, PLANES // 2)
    if count + count1 == 0:
        return False
    share, share1 = sum_by_halves(total), sum_by_halves(total1)
    half = np.int64(share1 > share)
    if half:
        share, above, below, ups, count = share1, above1, below1, ups1, count1
    if lows:
        ups -= BLOCK // 2 - count
        high, low = mean(sum_by_halves(above), ups), -mean(sum_by_halves(below), count - ups)
        floats_at(lows, b, 1)[0] = low
    else:
        high = mean(share, count)
        low = ZERO
    floats_at(highs, b, 1)[0] = high
    ints_at(highs, b, 1)[0] = (ints_at(highs, b, 1)[0] & -2) | np.int32(half) | np.int32(-(2**31))
    high = np.float32(abs(float32_at(highs, b)))
    low = low if lows else -high
    signs, none, zero = byte_vector(NONE), byte_vector(NONE), float_vector(ZERO)
    for plane in range(PLANES):
        a = load_sum(x, residual, at + plane * VECTOR_BYTES)
        if half == plane >> 2:
            there = a != zero
            signs = signs | where(a >= zero, byte_vector(np.uint8(1 << plane)), none)
            signs = signs | where(there, byte_vector(np.uint8(1 << (plane ^ 4))), none)
            a = where(there, without_signs(a, high, low), a)
        if subtract:
            write(new_residual + at + plane * VECTOR_BYTES, a + zero, past_caches)
    store(bits, signs)
    return True


@inline
def encode_block(
    x: Any, residual: Any, new_residual: Any, at: Any, bits: Any, b: Any, highs: Any, lows: Any,
    subtract: Any, past_caches: Any, size: Any, keep_zeros: Any,
) -> Any:  # fmt: skip
    """Encode block `b`, whose entries begin `at` bytes after the addresses; `keep_zeros`: if it is whole."""
    total_at = np.int64(0) if subtract else new_residual
    if lows:
        high, low, has_zeros = two_means(x, residual, total_at, at, bits, past_caches, size)
    else:
        high, has_zeros = one_mean(x, residual, total_at, at, bits, past_caches, size)
        low = -high
    if (
        keep_zeros
        and has_zeros
        and encode_half_block(x, residual, new_residual, at, bits, b, highs, lows, subtract, past_caches)
    ):
        return
    if lows:
        floats_at(lows, b, 1)[0] = low
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
    x: Any, residual: Any, new_residual: Any, numel: Any, bits: Any, highs: Any, lows: Any, subtract: Any,
    keep_zeros: Any,
) -> None:  # fmt: skip
    """`signs.encode_signs` by address.

    `residual` is 0 where there is none, and `lows` where one value is enough. With `subtract` the decoded
    signs are subtracted from `new_residual`.
    """
    whole, past_caches = numel // BLOCK, streams(new_residual, numel)
    for b in range(whole):
        at, signs = b * BLOCK * 4, bits + b * LANES
        encode_block(
            x, residual, new_residual, at, signs, b, highs, lows, subtract, past_caches, BLOCK, keep_zeros
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
        after, signs = at + 8 * BLOCK, short.ctypes.data
        encode_block(at, before, after, 0, signs, whole, highs, lows, subtract, False, rest, False)
        is_half = keep_zeros and encode_half(at, before, after, signs, whole, highs, lows, subtract, rest)
        if residual:
            floats_at(new_residual, begin, rest)[:] = padded[2, :rest]
        packed = bytes_at(bits, whole * LANES, (rest + 7) >> 3)
        if is_half:
            packed[:] = short[: packed.shape[0]]
        else:
            repack_signs(short, rest, packed)


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
    _ENCODE(x, residual, new_residual, numel, bits, means, 0, False, False)
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
def add_short_block(bits: Any, high: Any, low: Any, half: Any, out: Any) -> None:
    """Add one of two values to each entry of a short block."""
    lanes = bits.shape[0]
    for i in range(out.shape[0]):
        plane, byte = i // lanes, bits[i % lanes]
        value = high if (byte >> plane) & 1 else low
        out[i] += value if half < 0 or (half == plane >> 2 and (byte >> (plane ^ 4)) & 1) else ZERO


@inline
def decoded(signs: Any, plane: Any, high: Any, low: Any, half: Any) -> Any:
    """The values of 64 entries of a plane; `half` is -1 where all of them are sent, else the half that is."""
    none, zero = byte_vector(NONE), float_vector(ZERO)
    values = where((signs & byte_vector(np.uint8(1 << plane))) != none, high, low)
    if half < 0:
        return values
    there = (signs & byte_vector(np.uint8(1 << (plane ^ 4)))) != none
    return where(there, values, zero) if half == plane >> 2 else zero


@inline
def half_sent(highs: Any, b: Any) -> Any:
    """Which half of a block is sent; -1: all of it."""
    pattern = ints_at(highs, b, 1)[0]
    return pattern & 1 if pattern < 0 else -1


@inline
def add_planes(
    bits: Any, values: Any, halves: Any, b: Any, first: Any, fresh: Any, at: Any, past_caches: Any
) -> None:
    """Add what all peers sent of four planes (each 64 entries) of block `b`, from plane `first` on."""
    a0, a1, a2, a3 = float_vector(ZERO), float_vector(ZERO), float_vector(ZERO), float_vector(ZERO)
    if not fresh:
        a0, a1 = load_floats(at), load_floats(at + VECTOR_BYTES)
        a2, a3 = load_floats(at + 2 * VECTOR_BYTES), load_floats(at + 3 * VECTOR_BYTES)
    for peer in range(bits.shape[0]):
        signs, half = load_bytes(bits[peer] + b * LANES), halves[peer]
        high, low = float_vector(values[peer, 0]), float_vector(values[peer, 1])
        a0 = a0 + decoded(signs, first, high, low, half)
        a1 = a1 + decoded(signs, first + 1, high, low, half)
        a2 = a2 + decoded(signs, first + 2, high, low, half)
        a3 = a3 + decoded(signs, first + 3, high, low, half)
    write(at, a0, past_caches)
    write(at + VECTOR_BYTES, a1, past_caches)
    write(at + 2 * VECTOR_BYTES, a2, past_caches)
    write(at + 3 * VECTOR_BYTES, a3, past_caches)


def _add(
    bits: Any, highs: Any, lows: Any, stride: Any, weight: Any, fresh: Any, out: Any, numel: Any
) -> None:
    """Add `weight` times each peer's values, in order. With `stride` 0 the first value is for all blocks."""
    values, halves = np.empty((bits.shape[0], 2), np.float32), np.empty(bits.shape[0], np.int64)
    whole, past_caches = numel // BLOCK, fresh and streams(out, numel)
    for b in range(whole + (numel > whole * BLOCK)):
        if b == 0 or stride:
            for peer in range(bits.shape[0]):
                halves[peer] = half_sent(highs[peer], b * stride)
                values[peer, 0] = abs(float32_at(highs[peer], b * stride)) * weight
                values[peer, 1] = (
                    float32_at(lows[peer], b * stride) * weight if lows.shape[0] else -values[peer, 0]
                )
        if b < whole:
            for first in range(0, PLANES, 4):
                at = out + (b * PLANES + first) * VECTOR_BYTES
                add_planes(bits, values, halves, b, first, fresh, at, past_caches)
            continue
        rest = floats_at(out, b * BLOCK, numel - b * BLOCK)
        if fresh:
            rest[:] = 0
        for peer in range(bits.shape[0]):
            signs = bytes_at(bits[peer], b * LANES, (rest.shape[0] + 7) >> 3)
            add_short_block(signs, values[peer, 0], values[peer, 1], halves[peer], rest)
    settle()


_ENCODE = compile_now(_encode, [f"void({'int64, ' * 7} boolean, boolean)"])
_OVERALL = compile_now(_overall, ["void(int64, int64, int64)"])
_ENCODE_ONE = compile_now(_encode_one, [f"void({', '.join(['int64'] * 7)})"])
_ADD = compile_now(_add, ["void(int64[::1], int64[::1], int64[::1], int64, float32, boolean, int64, int64)"])


def encode_signs(
    x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None, keep_zeros: bool = False,
    residual: Tensor | None = None, new_residual: Tensor | None = None, subtract: bool = True,
) -> None:  # fmt: skip
    """See `kernels.signs`."""
    subtract = subtract and residual is not None
    given = x.data_ptr(), address(residual), address(new_residual), x.numel()
    _ENCODE(*given, bits.data_ptr(), highs.data_ptr(), address(lows), subtract, keep_zeros)


def encode_sign(
    x: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """See `kernels.signs`."""
    given = x.data_ptr(), address(residual), address(new_residual), x.numel()
    _ENCODE_ONE(*given, bits.data_ptr(), means.data_ptr(), magnitude.data_ptr())


def add_signs_(payloads: Sequence[SignPayload], weight: float, out: Tensor, fresh: bool) -> None:
    """See `kernels.signs`."""
    bits, highs = addresses([p[0] for p in payloads]), addresses([p[1] for p in payloads])
    lows = addresses([p[2] for p in payloads if p[2] is not None])
    stride = min(1, payloads[0][1].numel() - 1)
    _ADD(bits, highs, lows, stride, weight, fresh, out.data_ptr(), out.numel())
