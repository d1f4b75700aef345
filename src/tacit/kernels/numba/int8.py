"""`kernels.int8` by numba: levels and the residual in one pass; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import address, columns
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.passes import load_and_fetch, load_sum, streams, write
from tacit.kernels.numba.pointers import bytes_at, float32_at, floats_at
from tacit.kernels.numba.primitives import MAGNITUDE, capped, safe_inverse
from tacit.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    float_bits,
    float_from_bits,
    float_vector,
    int_vector,
    largest_lane,
    load_bytes,
    load_floats,
    low_bytes,
    settle,
    sign_extend,
    store,
    to_float,
    where,
)

BLOCK, VECTORS = 512, 8
TOP = np.float32(127)
ROUNDER = np.float32(12582912.0)
"""1.5 * 2^23. Added and subtracted again, it rounds to the nearest integer, to the even one of two. While it
is added, the lowest byte of the bits is that of the integer."""


@inline
def encode_block(
    x: Any, residual: Any, new_residual: Any, at: Any, codes: Any, units: Any, b: Any, past_caches: Any
) -> None:
    """Encode block `b`, whose entries begin `at` bytes after the addresses."""
    largest = int_vector(np.int32(0))
    for i in range(VECTORS):
        a = load_sum(x, residual, at + i * VECTOR_BYTES)
        bits = float_bits(a) & int_vector(MAGNITUDE)
        largest = where(bits >= largest, bits, largest)
    unit = capped(float_from_bits(largest_lane(largest))) / TOP
    inverse = safe_inverse(unit)
    unit = unit if inverse > 0 else np.float32(0)
    floats_at(units, b, 1)[0] = unit
    for i in range(VECTORS):
        here = at + i * VECTOR_BYTES
        a = load_and_fetch(x, residual, here)
        shifted = a * float_vector(inverse) + float_vector(ROUNDER)
        store(codes + i * LANES, low_bytes(float_bits(shifted)))
        if residual:
            rest = a - float_vector(unit) * (shifted - float_vector(ROUNDER))
            write(new_residual + here, rest, past_caches)


def _encode(x: Any, residual: Any, new_residual: Any, numel: Any, codes: Any, units: Any) -> None:
    """`int8.encode_int8` by address; `residual` is 0 where there is none."""
    whole, past_caches = numel // BLOCK, streams(new_residual, numel)
    for b in range(whole):
        encode_block(x, residual, new_residual, b * BLOCK * 4, codes + b * BLOCK, units, b, past_caches)
    settle()
    rest = numel - whole * BLOCK
    if rest:
        begin = whole * BLOCK
        padded, levels = np.zeros((3, BLOCK), np.float32), np.empty(BLOCK, np.uint8)
        padded[0, :rest] = floats_at(x, begin, rest)
        if residual:
            padded[1, :rest] = floats_at(residual, begin, rest)
        at = padded.ctypes.data
        before = at + 4 * BLOCK if residual else np.uint64(0)
        encode_block(at, before, at + 8 * BLOCK, 0, levels.ctypes.data, units, whole, False)
        if residual:
            floats_at(new_residual, begin, rest)[:] = padded[2, :rest]
        bytes_at(codes, begin, rest)[:] = levels[:rest]


def _add(codes: Any, units: Any, weight: Any, fresh: Any, out: Any, numel: Any) -> None:
    """Add `weight` times what each peer sent, decoded, in order."""
    unit = np.empty(codes.shape[0], np.float32)
    whole, past_caches = numel // BLOCK, fresh and streams(out, numel)
    for b in range(whole + (numel > whole * BLOCK)):
        for peer in range(codes.shape[0]):
            unit[peer] = float32_at(units[peer], b) * weight
        if b < whole:
            for start in range(b * BLOCK, (b + 1) * BLOCK, LANES):
                total = float_vector(np.float32(0)) if fresh else load_floats(out + 4 * start)
                for peer in range(codes.shape[0]):
                    level = to_float(sign_extend(load_bytes(codes[peer] + start)))
                    total = total + float_vector(unit[peer]) * level
                write(out + 4 * start, total, past_caches)
            continue
        target = floats_at(out, b * BLOCK, numel - b * BLOCK)
        if fresh:
            target[:] = 0
        for peer in range(codes.shape[0]):
            code = bytes_at(codes[peer], b * BLOCK, target.shape[0])
            for i in range(target.shape[0]):
                target[i] += unit[peer] * np.float32(np.int8(code[i]))
    settle()


_ENCODE = compile_now(_encode, [f"void({', '.join(['int64'] * 6)})"])
_ADD = compile_now(_add, ["void(int64[::1], int64[::1], float32, boolean, int64, int64)"])


def encode_int8(
    x: Tensor,
    codes: Tensor,
    units: Tensor,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:
    """See `kernels.int8`."""
    _ENCODE(
        x.data_ptr(), address(residual), address(new_residual), x.numel(), codes.data_ptr(), units.data_ptr()
    )


def add_int8_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """See `kernels.int8`."""
    _ADD(*columns(payloads), weight, fresh, out.data_ptr(), out.numel())
