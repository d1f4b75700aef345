"""`kernels.levels` by numba: quantize and pack in one pass; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import columns
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.levels_wide import (
    OFFSET,
    STEP,
    takes_wide,
    wide_add,
    wide_encode,
    wide_largest,
    wide_squares,
)
from tacit.kernels.numba.passes import streams
from tacit.kernels.numba.pointers import bytes_at, float32_at, floats_at, ints_at
from tacit.kernels.numba.primitives import capped, largest_pattern, philox_words, safe_inverse, sum_by_halves
from tacit.kernels.numba.vectors import float_from_bits, settle
from tacit.kernels.payload_layout import codes_per_group


@inline
def sum_of_squares(piece: Any, inverse: Any, lanes: Any, partial: Any) -> Any:
    """The sum of (x / max)^2, added up in the order of the reference."""
    partial[:] = 0
    for start in range(0, piece.shape[0], lanes):
        part = piece[start : start + lanes]
        for i in range(part.shape[0]):
            y = part[i] * inverse
            partial[i] += y * y
    return sum_by_halves(partial)


@inline
def square_root(square: Any) -> Any:
    """The square root by fp64: torch's in fp32 is not rounded correctly."""
    return np.float32(np.sqrt(np.float64(square)))


@inline
def top_value(piece: Any, at: Any, largest: Any, clip: Any, stride: Any, partial: Any, whole: Any) -> Any:
    """The value of the top level; see `levels.quantize`."""
    if clip == 0:
        return largest
    inverse = safe_inverse(largest)
    total = wide_squares(at, inverse) if whole else sum_of_squares(piece, inverse, stride, partial)
    if clip < 0:
        return capped(largest * square_root(total))
    share = clip * square_root(total / np.float32(piece.shape[0]))
    return largest * (share if share < np.float32(1) else np.float32(1))  # so with NaN all of it


@inline
def round_at_random(piece: Any, inverse: Any, top: Any, random: Any, codes: Any) -> None:
    """Levels by stochastic rounding, counted from 0."""
    offset, largest = OFFSET + np.float32(top), np.float32(top) + np.float32(top)
    for i in range(piece.shape[0]):
        u = np.float32(random[i]) * STEP + offset
        level = min(piece[i] * inverse + u, largest)
        codes[i] = np.uint8(np.int32(max(level, np.float32(0))))


@inline
def pack_codes(codes: Any, lanes: Any, group: Any, bits: Any, out: Any) -> None:
    """Codes to bytes; see `layout`."""
    for j in range(group):
        code = codes[j * lanes : (j + 1) * lanes]
        byte, shift = bits * j >> 3, bits * j & 7
        target = out[byte * lanes : (byte + 1) * lanes]
        if shift == 0:
            for i in range(code.shape[0]):
                target[i] = code[i]
        elif shift == 4:
            for i in range(code.shape[0]):
                target[i] |= np.uint8(code[i] << 4)
        else:
            for i in range(code.shape[0]):
                target[i] |= np.uint8(code[i] << shift)
        if shift + bits > 8:
            target = out[(byte + 1) * lanes : (byte + 2) * lanes]
            for i in range(code.shape[0]):
                target[i] = np.uint8(code[i] >> (8 - shift))


def _quantize(
    x: Any, numel: Any, bits: Any, group: Any, bucket: Any, clip: Any, seed: Any, codes: Any, units: Any
) -> None:
    """`levels.quantize` by address: a unit for each bucket, and the packed codes."""
    stride = bucket >> 3
    top = np.int32((1 << (bits - 1)) - 1)
    words, partial = np.empty(4 * stride, np.uint32), np.empty(stride, np.float32)
    random, plain = words.view(np.uint16), np.empty(bucket + 8, np.uint8)
    for b in range((numel + bucket - 1) // bucket):
        size = min(bucket, numel - b * bucket)
        whole = takes_wide(bits, bucket) and size == bucket
        at = x + 4 * b * bucket
        piece, begin = floats_at(at, 0, size), b * stride * bits
        largest = capped(
            wide_largest(at) if whole else float_from_bits(largest_pattern(ints_at(at, 0, size)))
        )
        unit = top_value(piece, at, largest, clip, stride, partial, whole) / np.float32(top)
        inverse = safe_inverse(unit)
        floats_at(units, b, 1)[0] = unit if inverse > 0 else np.float32(0)
        if whole:
            wide_encode(at, inverse, np.float32(top), seed, b * stride, bits, codes + begin)
            continue
        philox_words(seed, b * stride, (size + 7) >> 3, words)
        round_at_random(piece, inverse, top, random, plain)
        lanes = (size + group - 1) // group
        plain[size : group * lanes] = 0
        pack_codes(plain, lanes, group, bits, bytes_at(codes, begin, lanes * group * bits >> 3))


@inline
def add_codes(packed: Any, unit: Any, lanes: Any, group: Any, bits: Any, out: Any) -> None:
    """Unpack a bucket's codes, and add its unit times their levels."""
    mask = np.uint8((1 << bits) - 1)
    top = np.float32((1 << (bits - 1)) - 1)
    for j in range(group):
        target = out[j * lanes : (j + 1) * lanes]
        byte, shift = bits * j >> 3, bits * j & 7
        low = packed[byte * lanes : (byte + 1) * lanes]
        if shift + bits > 8:
            high = packed[(byte + 1) * lanes : (byte + 2) * lanes]
            for i in range(target.shape[0]):
                code = np.uint8((low[i] >> shift) | (high[i] << (8 - shift))) & mask
                target[i] += unit * (np.float32(code) - top)
        else:
            add_whole_codes(low, shift, mask, unit, top, target)


@inline
def add_whole_codes(low: Any, shift: Any, mask: Any, unit: Any, top: Any, out: Any) -> None:
    """`add_codes` for bytes that hold whole codes. Shifts by constants stay in bytes, others take 64 bits."""
    if shift == 0:
        for i in range(out.shape[0]):
            out[i] += unit * (np.float32(np.uint8(low[i] & mask)) - top)
    elif shift == 2:
        for i in range(out.shape[0]):
            out[i] += unit * (np.float32(np.uint8((low[i] >> 2) & mask)) - top)
    elif shift == 4:
        for i in range(out.shape[0]):
            out[i] += unit * (np.float32(np.uint8((low[i] >> 4) & mask)) - top)
    else:
        for i in range(out.shape[0]):
            out[i] += unit * (np.float32(np.uint8(low[i] >> shift) & mask) - top)


def _add(
    codes: Any, units: Any, bits: Any, group: Any, bucket: Any, weight: Any, fresh: Any, out: Any, numel: Any
) -> None:
    """Add `weight` times what each peer sent, decoded, to `out`, in order; `fresh`: to zeros."""
    stride = bucket >> 3
    unit, past_caches = np.empty(codes.shape[0], np.float32), fresh and streams(out, numel)
    for b in range((numel + bucket - 1) // bucket):
        size, begin = min(bucket, numel - b * bucket), b * stride * bits
        for peer in range(codes.shape[0]):
            unit[peer] = float32_at(units[peer], b) * weight
        if takes_wide(bits, bucket) and size == bucket:
            wide_add(codes, unit, begin, bits, fresh, out + 4 * b * bucket, past_caches)
            continue
        target = floats_at(out, b * bucket, size)
        lanes = (size + group - 1) // group
        if fresh:
            target[:] = 0
        for peer in range(codes.shape[0]):
            packed = bytes_at(codes[peer], begin, lanes * group * bits >> 3)
            add_codes(packed, unit[peer], lanes, group, bits, target)
    settle()


_QUANTIZE = compile_now(_quantize, ["void(int64, int64, int64, int64, int64, float32, uint64, int64, int64)"])
_ADD = compile_now(
    _add, ["void(int64[::1], int64[::1], int64, int64, int64, float32, boolean, int64, int64)"]
)


def quantize(x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor) -> None:
    """See `kernels.levels`."""
    group, to = codes_per_group(bits), (codes.data_ptr(), units.data_ptr())
    _QUANTIZE(x.data_ptr(), x.numel(), bits, group, bucket, clip, seed, *to)


def add_levels_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.levels`."""
    group = codes_per_group(bits)
    _ADD(*columns(payloads), bits, group, bucket, weight, fresh, out.data_ptr(), out.numel())
