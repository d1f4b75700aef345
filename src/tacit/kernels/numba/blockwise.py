"""`kernels.blockwise` by numba: packed levels and the residual in one pass; adds all peers in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import address, columns
from tacit.kernels.numba.int8 import ROUNDER
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.levels import pack_codes
from tacit.kernels.numba.passes import load_and_fetch, load_sum, streams, write
from tacit.kernels.numba.pointers import bytes_at, floats_at, shorts_at
from tacit.kernels.numba.primitives import MAGNITUDE, capped, safe_inverse
from tacit.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    byte_vector,
    float_bits,
    float_from_bits,
    float_vector,
    int_vector,
    largest_lane,
    load_bytes,
    load_floats,
    low_bytes,
    narrow_bytes,
    settle,
    short_vector,
    sign_extend,
    store,
    to_float,
    where,
    widen_bytes,
)
from tacit.kernels.payload_layout import codes_per_group

BLOCK, VECTORS, TRITS = 512, 8, 5
TRIT_LANES = (BLOCK + TRITS - 1) // TRITS
OVERLAP = TRIT_LANES - LANES
"""Where the second vector of a block's lanes begins; it ends with them."""
LARGEST_BF16 = np.float32(2.0**127 * (2 - 2.0**-7))


@inline
def bf16_up(unit: Any, at: Any, b: Any) -> Any:
    """`unit` in bf16, rounded up; also written as unit `b` at the address, or 0 where it is too small."""
    one = np.empty(1, np.float32)
    one[0] = unit
    bits = (one.view(np.int32)[0] + np.int32(0xFFFF)) & np.int32(-65536)
    rounded = float_from_bits(np.int32(bits))
    shorts_at(at, b, 1)[0] = np.uint16(bits >> 16) if safe_inverse(rounded) > 0 else np.uint16(0)
    return rounded


# ---- a whole block ------------------------------------------------------------------------------------


@inline
def encode_block(
    x: Any, residual: Any, new_residual: Any, at: Any, top: Any, plain: Any, units: Any, b: Any,
    past_caches: Any,
) -> None:  # fmt: skip
    """Write the codes of block `b`, whose entries begin `at` bytes after the addresses, to `plain`."""
    largest = int_vector(np.int32(0))
    for i in range(VECTORS):
        a = load_sum(x, residual, at + i * VECTOR_BYTES)
        bits = float_bits(a) & int_vector(MAGNITUDE)
        largest = where(bits >= largest, bits, largest)
    unit = bf16_up(
        min(capped(float_from_bits(largest_lane(largest))), LARGEST_BF16) / np.float32(top), units, b
    )
    inverse = safe_inverse(unit)
    unit = unit if inverse > 0 else np.float32(0)
    for i in range(VECTORS):
        here = at + i * VECTOR_BYTES
        a = load_and_fetch(x, residual, here)
        shifted = a * float_vector(inverse) + float_vector(ROUNDER)
        store(plain + i * LANES, low_bytes(float_bits(shifted)) + byte_vector(np.uint8(top)))
        if residual:
            rest = a - float_vector(unit) * (shifted - float_vector(ROUNDER))
            write(new_residual + here, rest, past_caches)


@inline
def pack_three_bits(plain: Any, out: Any) -> None:
    """Eight codes of each lane to three bytes."""
    one, two, three = byte_vector(np.uint8(1)), byte_vector(np.uint8(2)), byte_vector(np.uint8(3))
    four, five, six = byte_vector(np.uint8(4)), byte_vector(np.uint8(5)), byte_vector(np.uint8(6))
    seven = byte_vector(np.uint8(7))
    k2, k5 = load_bytes(plain + 2 * LANES), load_bytes(plain + 5 * LANES)
    low = load_bytes(plain) | (load_bytes(plain + LANES) << three) | (k2 << six)
    middle = (k2 >> two) | (load_bytes(plain + 3 * LANES) << one) | (load_bytes(plain + 4 * LANES) << four)
    high = (k5 >> one) | (load_bytes(plain + 6 * LANES) << two) | (load_bytes(plain + 7 * LANES) << five)
    store(out, low)
    store(out + LANES, middle | (k5 << seven))
    store(out + 2 * LANES, high)


@inline
def pack_fives(plain: Any, out: Any) -> None:
    """Five codes of each of 103 lanes to a byte, in two vectors that overlap."""
    three = byte_vector(np.uint8(3))
    for start in range(0, OVERLAP + 1, OVERLAP):
        total = load_bytes(plain + 4 * TRIT_LANES + start)
        for j in range(3, -1, -1):
            total = total * three + load_bytes(plain + j * TRIT_LANES + start)
        store(out + start, total)


@inline
def unpack_three_bits(packed: Any, plain: Any) -> None:
    """`pack_three_bits`, back."""
    one, two, three = byte_vector(np.uint8(1)), byte_vector(np.uint8(2)), byte_vector(np.uint8(3))
    four, five, six = byte_vector(np.uint8(4)), byte_vector(np.uint8(5)), byte_vector(np.uint8(6))
    seven = byte_vector(np.uint8(7))
    low, middle, high = load_bytes(packed), load_bytes(packed + LANES), load_bytes(packed + 2 * LANES)
    store(plain, low & seven)
    store(plain + LANES, (low >> three) & seven)
    store(plain + 2 * LANES, ((low >> six) | (middle << two)) & seven)
    store(plain + 3 * LANES, (middle >> one) & seven)
    store(plain + 4 * LANES, (middle >> four) & seven)
    store(plain + 5 * LANES, ((middle >> seven) | (high << one)) & seven)
    store(plain + 6 * LANES, (high >> two) & seven)
    store(plain + 7 * LANES, high >> five)


@inline
def unpack_fives(packed: Any, plain: Any) -> None:
    """`pack_fives`, back: v / 3 is v * 171 >> 9 of a byte."""
    three, third, nine = short_vector(np.uint16(3)), short_vector(np.uint16(171)), short_vector(np.uint16(9))
    for start in range(0, OVERLAP + 1, OVERLAP):
        rest = widen_bytes(load_bytes(packed + start))
        for j in range(TRITS):
            quotient = (rest * third) >> nine
            store(plain + j * TRIT_LANES + start, narrow_bytes(rest - quotient * three))
            rest = quotient


# ---- blocks of any size -------------------------------------------------------------------------------


@inline
def pack_trits(plain: Any, lanes: Any, out: Any) -> None:
    """Codes from 0 to 2 to bytes; see `layout`."""
    for i in range(lanes):
        total = np.uint8(0)
        for j in range(TRITS - 1, -1, -1):
            total = np.uint8(total * 3 + plain[j * lanes + i])
        out[i] = total


@inline
def unpack_trits(packed: Any, lanes: Any, plain: Any) -> None:
    """`pack_trits`, back."""
    for i in range(lanes):
        rest = packed[i]
        for j in range(TRITS):
            plain[j * lanes + i] = rest % 3
            rest = np.uint8(rest // 3)


@inline
def unpack_codes(packed: Any, lanes: Any, group: Any, bits: Any, plain: Any) -> None:
    """Bytes to codes; see `layout`."""
    mask = np.uint8((1 << bits) - 1)
    for j in range(group):
        target = plain[j * lanes : (j + 1) * lanes]
        byte, shift = bits * j >> 3, bits * j & 7
        low = packed[byte * lanes : (byte + 1) * lanes]
        if shift == 0:
            for i in range(target.shape[0]):
                target[i] = np.uint8(low[i] & mask)
        elif shift == 4:
            for i in range(target.shape[0]):
                target[i] = np.uint8(np.uint8(low[i] >> 4) & mask)
        else:
            for i in range(target.shape[0]):
                target[i] = np.uint8(low[i] >> shift) & mask
        if shift + bits > 8:
            high = packed[(byte + 1) * lanes : (byte + 2) * lanes]
            for i in range(target.shape[0]):
                target[i] |= np.uint8(np.uint8(high[i] << (8 - shift)) & mask)


@inline
def pack(plain: Any, size: Any, bits: Any, group: Any, out: Any) -> Any:
    """Pack a block's codes, to the address `out`; how many bytes that were."""
    at = plain.ctypes.data
    if bits == 2:
        lanes = (size + TRITS - 1) // TRITS
        plain[size : TRITS * lanes] = 0
        if size == BLOCK:
            pack_fives(at, out)
        else:
            pack_trits(plain, lanes, bytes_at(out, 0, lanes))
        return lanes
    lanes = (size + group - 1) // group
    if bits == 3 and size == BLOCK:
        pack_three_bits(at, out)
    else:
        plain[size : group * lanes] = 0
        pack_codes(plain, lanes, group, bits, bytes_at(out, 0, lanes * group * bits >> 3))
    return lanes * group * bits >> 3


@inline
def unpack(packed: Any, size: Any, bits: Any, group: Any, plain: Any) -> Any:
    """`pack`, back, from the address `packed`; how many bytes were read."""
    at = plain.ctypes.data
    if bits == 2:
        lanes = (size + TRITS - 1) // TRITS
        if size == BLOCK:
            unpack_fives(packed, at)
        else:
            unpack_trits(bytes_at(packed, 0, lanes), lanes, plain)
        return lanes
    lanes = (size + group - 1) // group
    if bits == 3 and size == BLOCK:
        unpack_three_bits(packed, at)
    else:
        unpack_codes(bytes_at(packed, 0, lanes * group * bits >> 3), lanes, group, bits, plain)
    return lanes * group * bits >> 3


@inline
def _group(bits: Any) -> Any:
    """How many codes make whole bytes; see `layout`."""
    if bits == 8:
        return 1
    return 4 if bits == 2 or bits == 6 else 2 if bits == 4 else 8


# ---- the kernels --------------------------------------------------------------------------------------


def _encode(
    x: Any, residual: Any, new_residual: Any, numel: Any, bits: Any, group: Any, codes: Any, units: Any
) -> None:
    """`blockwise.encode_blocks` by address; `residual` is 0 where there is none."""
    top = (1 << (bits - 1)) - 1
    plain = np.empty(BLOCK + 8, np.uint8)
    whole, past_caches = numel // BLOCK, streams(new_residual, numel)
    for b in range(whole):
        encode_block(x, residual, new_residual, b * BLOCK * 4, top, plain.ctypes.data, units, b, past_caches)
        codes += pack(plain, BLOCK, bits, group, codes)
    settle()
    rest = numel - whole * BLOCK
    if rest:
        begin = whole * BLOCK
        padded = np.zeros((3, BLOCK), np.float32)
        padded[0, :rest] = floats_at(x, begin, rest)
        if residual:
            padded[1, :rest] = floats_at(residual, begin, rest)
        at = padded.ctypes.data
        before = at + 4 * BLOCK if residual else np.uint64(0)
        encode_block(at, before, at + 8 * BLOCK, 0, top, plain.ctypes.data, units, whole, False)
        if residual:
            floats_at(new_residual, begin, rest)[:] = padded[2, :rest]
        pack(plain, rest, bits, group, codes)


def _add(
    codes: Any, units: Any, bits: Any, group: Any, weight: Any, fresh: Any, out: Any, numel: Any
) -> None:
    """Add `weight` times what each peer sent, decoded, in order."""
    peers = codes.shape[0]
    top = np.uint8((1 << (bits - 1)) - 1)
    unit, one = np.empty(peers, np.float32), np.empty(1, np.int32)
    plain = np.empty((peers, BLOCK + 8), np.uint8)
    begin, past_caches = 0, fresh and streams(out, numel)
    for b in range((numel + BLOCK - 1) // BLOCK):
        size, used = min(BLOCK, numel - b * BLOCK), 0
        for peer in range(peers):
            one[0] = np.int32(shorts_at(units[peer], b, 1)[0]) << 16
            unit[peer] = one.view(np.float32)[0] * weight
            used = unpack(codes[peer] + begin, size, bits, group, plain[peer])
        begin += used
        if size == BLOCK:
            at = plain.ctypes.data
            for start in range(0, BLOCK, LANES):
                to = out + 4 * (b * BLOCK + start)
                total = float_vector(np.float32(0)) if fresh else load_floats(to)
                for peer in range(peers):
                    code = load_bytes(at + peer * (BLOCK + 8) + start) - byte_vector(top)
                    total = total + float_vector(unit[peer]) * to_float(sign_extend(code))
                write(to, total, past_caches)
            continue
        target = floats_at(out, b * BLOCK, size)
        if fresh:
            target[:] = 0
        for peer in range(peers):
            for i in range(size):
                target[i] += unit[peer] * np.float32(np.int32(plain[peer, i]) - np.int32(top))
    settle()


_ENCODE = compile_now(_encode, [f"void({', '.join(['int64'] * 8)})"])
_ADD = compile_now(_add, ["void(int64[::1], int64[::1], int64, int64, float32, boolean, int64, int64)"])


def encode_blocks(
    x: Tensor, bits: int, codes: Tensor, units: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """See `kernels.blockwise`."""
    group, given = codes_per_group(bits), (x.data_ptr(), address(residual), address(new_residual), x.numel())
    _ENCODE(*given, bits, group, codes.data_ptr(), units.data_ptr())


def add_blocks_(
    payloads: Sequence[Sequence[Tensor]], bits: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.blockwise`."""
    group = codes_per_group(bits)
    _ADD(*columns(payloads), bits, group, weight, fresh, out.data_ptr(), out.numel())
