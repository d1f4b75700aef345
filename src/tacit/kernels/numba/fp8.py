"""`kernels.fp8` by numba: rounds 64 entries at a time, and adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.dispatch import columns
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.passes import streams, write
from tacit.kernels.numba.pointers import bytes_at, float32_at, floats_at
from tacit.kernels.numba.primitives import MAGNITUDE
from tacit.kernels.numba.vectors import (
    LANES,
    float_bits,
    float_vector,
    floats_of_bits,
    int_vector,
    load_bytes,
    load_floats,
    low_bytes,
    settle,
    store,
    to_float,
    where,
    zero_extend,
)

INFINITY, NAN = np.int32(0x7F800000), np.int32(0x7FC00000)
ZERO = np.float32(0)


@inline
def decoded(code: Any, fraction: Any, bias: Any, special: Any) -> Any:
    """The numbers of 64 bytes.

    Args:
        fraction: bits of the fraction; `bias`: of the exponent; `special`: the code of infinity, or that
            below NaN where there is none.
    """
    bits = zero_extend(code)
    low, shift = bits & int_vector(np.int32(127)), np.int32(23 - fraction)
    least = np.float32(2.0) ** np.float32(1 - bias - fraction)
    number = floats_of_bits((low << int_vector(shift)) + int_vector(np.int32((127 - bias) << 23)))
    small = int_vector(np.int32(1 << fraction))
    number = where(low < small, to_float(low) * float_vector(least), number)
    number_bits = float_bits(number)
    if fraction == 2:
        number_bits = where(low >= int_vector(special), int_vector(INFINITY), number_bits)
    number_bits = where(int_vector(special) < low, int_vector(NAN), number_bits)
    return floats_of_bits(number_bits | ((bits & int_vector(np.int32(128))) << int_vector(np.int32(24))))


@inline
def encoded(a: Any, fraction: Any, bias: Any, special: Any) -> Any:
    """64 numbers as bytes, rounded to the nearest, of two to the even one; too large ones as by torch."""
    bits, shift = float_bits(a), np.int32(23 - fraction)
    low = bits & int_vector(MAGNITUDE)
    half = int_vector(np.int32((1 << (shift - 1)) - 1)) + (
        (low >> int_vector(shift)) & int_vector(np.int32(1))
    )
    code = (low - int_vector(np.int32((127 - bias) << 23)) + half) >> int_vector(shift)
    least = np.float32(2.0) ** np.float32(1 - bias - fraction)
    rounder = float_vector(least * np.float32(12582912.0))  # see `int8.ROUNDER`
    small = float_bits(floats_of_bits(low) + rounder) & int_vector(np.int32(127))
    code = where(low < int_vector(np.int32((128 - bias) << 23)), small, code)
    code = where(int_vector(special) < code, int_vector(special), code)
    code = where(int_vector(INFINITY) < low, int_vector(np.int32(127)), code)
    sign = (bits >> int_vector(np.int32(24))) & int_vector(np.int32(128))
    return low_bytes(code | sign)


def _encode(x: Any, numel: Any, inverse: Any, fraction: Any, bias: Any, special: Any, codes: Any) -> None:
    """`fp8.encode_fp8` by address."""
    whole, factor = numel // LANES, float_vector(np.float32(inverse))
    for i in range(whole):
        a = load_floats(x + 4 * i * LANES) * factor
        store(codes + i * LANES, encoded(a, fraction, bias, np.int32(special)))
    rest = numel - whole * LANES
    if rest:
        padded, short = np.zeros(LANES, np.float32), np.empty(LANES, np.uint8)
        padded[:rest] = floats_at(x, whole * LANES, rest)
        a = load_floats(padded.ctypes.data) * factor
        store(short.ctypes.data, encoded(a, fraction, bias, np.int32(special)))
        bytes_at(codes, whole * LANES, rest)[:] = short[:rest]


def _add(
    codes: Any, scales: Any, weight: Any, fraction: Any, bias: Any, special: Any, fresh: Any, out: Any,
    numel: Any,
) -> None:  # fmt: skip
    """`fp8.add_fp8_` by address, in order."""
    peers, whole, past_caches = codes.shape[0], numel // LANES, fresh and streams(out, numel)
    scale = np.empty(peers, np.float32)
    for peer in range(peers):
        scale[peer] = float32_at(scales[peer], 0) * weight
    for i in range(whole):
        to = out + 4 * i * LANES
        total = float_vector(ZERO) if fresh else load_floats(to)
        for peer in range(peers):
            number = decoded(load_bytes(codes[peer] + i * LANES), fraction, bias, np.int32(special))
            total = total + number * float_vector(scale[peer])
        write(to, total, past_caches)
    settle()
    rest = numel - whole * LANES
    if rest:
        target, padded = floats_at(out, whole * LANES, rest), np.zeros(LANES, np.uint8)
        sums = np.zeros(LANES, np.float32)
        if not fresh:
            sums[:rest] = target
        for peer in range(peers):
            padded[:rest] = bytes_at(codes[peer], whole * LANES, rest)
            number = decoded(load_bytes(padded.ctypes.data), fraction, bias, np.int32(special))
            total = load_floats(sums.ctypes.data) + number * float_vector(scale[peer])
            store(sums.ctypes.data, total)
        target[:] = sums[:rest]


_ENCODE = compile_now(_encode, ["void(int64, int64, float32, int64, int64, int64, int64)"])
_ADD = compile_now(
    _add, ["void(int64[::1], int64[::1], float32, int64, int64, int64, boolean, int64, int64)"]
)
PARTS = {torch.float8_e4m3fn: (3, 7, 126), torch.float8_e5m2: (2, 15, 124)}
"""Bits of the fraction, bias of the exponent, and the largest code of a number, or that of infinity."""


def encode_fp8(x: Tensor, inverse: Tensor, dtype: torch.dtype, codes: Tensor) -> None:
    """See `kernels.fp8`."""
    _ENCODE(x.data_ptr(), x.numel(), inverse.item(), *PARTS[dtype], codes.data_ptr())


def add_fp8_(
    payloads: Sequence[Sequence[Tensor]], dtype: torch.dtype, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.fp8`."""
    _ADD(*columns(payloads), weight, *PARTS[dtype], fresh, out.data_ptr(), out.numel())
