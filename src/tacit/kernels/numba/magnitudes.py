"""`kernels.magnitudes` by numba: each in one pass. The largest magnitude has the largest bit pattern."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.pointers import floats_at, ints_at, shorts_at
from tacit.kernels.numba.primitives import MAGNITUDE
from tacit.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    float_bits,
    float_from_bits,
    float_vector,
    floats_of_bits,
    int_vector,
    largest_lane,
    load_floats,
    load_shorts,
    low_shorts,
    store,
    where,
    zero_extend,
)

HALF_BYTES = VECTOR_BYTES // 2
NAN = np.int32(0x7FC0)


@inline
def larger(bits: Any, most: Any) -> Any:
    """The larger magnitudes of two vectors, as patterns."""
    bits = bits & int_vector(MAGNITUDE)
    return where(bits >= most, bits, most)


@inline
def rounded(bits: Any) -> Any:
    """Patterns of fp32 to those of bf16."""
    odd = (bits >> int_vector(np.int32(16))) & int_vector(np.int32(1))
    nearest = (bits + odd + int_vector(np.int32(0x7FFF))) >> int_vector(np.int32(16))
    nan = (bits & int_vector(MAGNITUDE)) >= int_vector(np.int32(0x7F800001))
    return where(nan, int_vector(NAN), nearest)


@inline
def widened(at: Any) -> Any:
    """64 numbers of bf16, as fp32."""
    return floats_of_bits(zero_extend(load_shorts(at)) << int_vector(np.int32(16)))


@inline
def divide_vector(at: Any, by: Any, most: Any) -> Any:
    """Divide 64 numbers of fp32."""
    quotient = load_floats(at) / by
    store(at, quotient)
    return larger(float_bits(quotient), most)


@inline
def divide_halves(at: Any, by: Any, most: Any) -> Any:
    """Divide 64 numbers of bf16."""
    bits = rounded(float_bits(widened(at) / by))
    store(at, low_shorts(bits))
    return larger(bits << int_vector(np.int32(16)), most)


def _largest(x: Any, numel: Any) -> Any:
    """`magnitudes.largest` of fp32, by address."""
    most, whole = int_vector(np.int32(0)), numel // LANES
    for i in range(whole):
        most = larger(float_bits(load_floats(x + i * VECTOR_BYTES)), most)
    found = largest_lane(most)
    for bits in ints_at(x, whole * LANES, numel - whole * LANES):
        found = max(found, bits & MAGNITUDE)
    return float_from_bits(found)


def _largest_bf16(x: Any, numel: Any) -> Any:
    """`magnitudes.largest` of bf16, by address."""
    most = np.int32(0)
    for bits in shorts_at(x, 0, numel):
        most = max(most, np.int32(bits) & np.int32(0x7FFF))
    return float_from_bits(np.int32(most << np.int32(16)))


def _divide(x: Any, numel: Any, by: Any) -> Any:
    """`magnitudes.divide_` of fp32, by address."""
    most, divisor, whole = int_vector(np.int32(0)), float_vector(by), numel // LANES
    for i in range(whole):
        most = divide_vector(x + i * VECTOR_BYTES, divisor, most)
    rest = floats_at(x, whole * LANES, numel - whole * LANES)
    if rest.shape[0]:
        padded = np.zeros(LANES, np.float32)
        padded[: rest.shape[0]] = rest
        most = divide_vector(padded.ctypes.data, divisor, most)
        rest[:] = padded[: rest.shape[0]]
    return float_from_bits(largest_lane(most))


def _divide_bf16(x: Any, numel: Any, by: Any) -> Any:
    """`magnitudes.divide_` of bf16, by address."""
    most, divisor, whole = int_vector(np.int32(0)), float_vector(by), numel // LANES
    for i in range(whole):
        most = divide_halves(x + i * HALF_BYTES, divisor, most)
    rest = shorts_at(x, whole * LANES, numel - whole * LANES)
    if rest.shape[0]:
        padded = np.zeros(LANES, np.uint16)
        padded[: rest.shape[0]] = rest
        most = divide_halves(padded.ctypes.data, divisor, most)
        rest[:] = padded[: rest.shape[0]]
    return float_from_bits(largest_lane(most))


def _round_bf16(x: Any, numel: Any, out: Any) -> None:
    """`magnitudes.round_bf16`, by address."""
    whole = numel // LANES
    for i in range(whole):
        store(out + i * HALF_BYTES, low_shorts(rounded(float_bits(load_floats(x + i * VECTOR_BYTES)))))
    rest = floats_at(x, whole * LANES, numel - whole * LANES)
    if rest.shape[0]:
        padded, short = np.zeros(LANES, np.float32), np.empty(LANES, np.uint16)
        padded[: rest.shape[0]] = rest
        store(short.ctypes.data, low_shorts(rounded(float_bits(load_floats(padded.ctypes.data)))))
        shorts_at(out, whole * LANES, rest.shape[0])[:] = short[: rest.shape[0]]


def _widen_bf16(x: Any, numel: Any, out: Any) -> None:
    """`magnitudes.widen_bf16`, by address."""
    whole = numel // LANES
    for i in range(whole):
        store(out + i * VECTOR_BYTES, widened(x + i * HALF_BYTES))
    rest = shorts_at(x, whole * LANES, numel - whole * LANES)
    target = ints_at(out, whole * LANES, rest.shape[0])
    for i in range(rest.shape[0]):
        target[i] = np.int32(rest[i]) << np.int32(16)


_LARGEST = compile_now(_largest, ["float32(int64, int64)"])
_LARGEST_BF16 = compile_now(_largest_bf16, ["float32(int64, int64)"])
_DIVIDE = compile_now(_divide, ["float32(int64, int64, float32)"])
_DIVIDE_BF16 = compile_now(_divide_bf16, ["float32(int64, int64, float32)"])
_ROUND_BF16 = compile_now(_round_bf16, ["void(int64, int64, int64)"])
_WIDEN_BF16 = compile_now(_widen_bf16, ["void(int64, int64, int64)"])


def largest(x: Tensor) -> float:
    """See `kernels.magnitudes`."""
    find = _LARGEST if x.dtype == torch.float32 else _LARGEST_BF16
    return float(find(x.data_ptr(), x.numel()))


def divide_(x: Tensor, by: float) -> float:
    """See `kernels.magnitudes`."""
    divide = _DIVIDE if x.dtype == torch.float32 else _DIVIDE_BF16
    return float(divide(x.data_ptr(), x.numel(), by))


def round_to_(x: Tensor, out: Tensor) -> None:
    """See `kernels.magnitudes`; to bf16 by a kernel."""
    if out.dtype == torch.bfloat16 and out.is_contiguous():
        _ROUND_BF16(x.data_ptr(), x.numel(), out.data_ptr())
    else:
        out.copy_(x)


def widen_(x: Tensor, out: Tensor) -> None:
    """See `kernels.magnitudes`; to fp32 by a kernel."""
    if out.dtype == torch.float32 and out.is_contiguous():
        _WIDEN_BF16(x.data_ptr(), x.numel(), out.data_ptr())
    else:
        out.copy_(x)
