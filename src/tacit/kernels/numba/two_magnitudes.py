"""`kernels.two_magnitudes` by numba: codes and means bucket by bucket; adds all peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import columns
from tacit.kernels.numba.blockwise import LARGEST_BF16
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.levels import pack_codes
from tacit.kernels.numba.pointers import bytes_at, floats_at, ints_at, shorts_at
from tacit.kernels.numba.primitives import capped, largest_pattern, safe_inverse, sum_by_halves
from tacit.kernels.numba.vectors import float_from_bits


@inline
def mean_of(y: Any, codes: Any, of: Any, count: Any, partial: Any) -> Any:
    """The mean of the magnitudes with this code, `count` of them; of all, where `of` is 2."""
    partial[:] = 0
    lanes = partial.shape[0]
    for start in range(0, y.shape[0], lanes):
        part, code = y[start : start + lanes], codes[start : start + lanes]
        for i in range(part.shape[0]):
            partial[i] += part[i] if of == 2 or code[i] == of else np.float32(0)
    return sum_by_halves(partial) / np.float32(max(count, 1))


@inline
def write_bf16(scale: Any, at: Any, i: Any) -> None:
    """Number `i` of the bf16 numbers at the address, rounded to the nearest."""
    one = np.empty(1, np.float32)
    one[0] = min(capped(scale), LARGEST_BF16)
    bits = one.view(np.uint32)[0]
    shorts_at(at, i, 1)[0] = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16)


def _encode(x: Any, numel: Any, bucket: Any, codes: Any, units: Any) -> None:
    """`two_magnitudes.encode_magnitudes`, by address."""
    partial, y = np.empty(bucket >> 3, np.float32), np.empty(bucket, np.float32)
    plain = np.empty(bucket + 8, np.uint8)
    for b in range((numel + bucket - 1) // bucket):
        size = min(bucket, numel - b * bucket)
        piece, magnitudes, code = floats_at(x, b * bucket, size), y[:size], plain[:size]
        largest = capped(float_from_bits(largest_pattern(ints_at(x, b * bucket, size))))
        inverse = safe_inverse(largest)
        for i in range(size):
            magnitudes[i] = np.abs(piece[i]) * inverse
        middle = mean_of(magnitudes, code, 2, size, partial)
        large = 0
        for i in range(size):
            code[i] = np.uint8(magnitudes[i] > middle)
            large += code[i]
        write_bf16(mean_of(magnitudes, code, 0, size - large, partial) * largest, units, 2 * b)
        write_bf16(mean_of(magnitudes, code, 1, large, partial) * largest, units, 2 * b + 1)
        for i in range(size):
            code[i] |= np.uint8(np.uint8(piece[i] < 0) << 1)
        lanes = (size + 3) >> 2
        plain[size : 4 * lanes] = 0
        pack_codes(plain, lanes, 4, 2, bytes_at(codes, b * (bucket >> 2), lanes))


@inline
def float_of_bf16(at: Any, i: Any) -> Any:
    """Number `i` of the bf16 numbers at the address."""
    return float_from_bits(np.int32(np.uint32(shorts_at(at, i, 1)[0]) << 16))


def _add(codes: Any, units: Any, bucket: Any, weight: Any, fresh: Any, out: Any, numel: Any) -> None:
    """`two_magnitudes.add_magnitudes_`, by address."""
    values = np.empty(4, np.float32)
    for b in range((numel + bucket - 1) // bucket):
        size = min(bucket, numel - b * bucket)
        target, lanes = floats_at(out, b * bucket, size), (size + 3) >> 2
        if fresh:
            target[:] = 0
        for peer in range(codes.shape[0]):
            for i in range(2):
                values[i] = float_of_bf16(units[peer], 2 * b + i) * weight
                values[2 + i] = -values[i]
            packed = bytes_at(codes[peer], b * (bucket >> 2), lanes)
            for j in range(4):
                lane = target[j * lanes : (j + 1) * lanes]
                for i in range(lane.shape[0]):
                    lane[i] += values[(packed[i] >> (2 * j)) & 3]


_ENCODE = compile_now(_encode, ["void(int64, int64, int64, int64, int64)"])
_ADD = compile_now(_add, ["void(int64[::1], int64[::1], int64, float32, boolean, int64, int64)"])


def encode_magnitudes(x: Tensor, bucket: int, codes: Tensor, units: Tensor) -> None:
    """See `kernels.two_magnitudes`."""
    _ENCODE(x.data_ptr(), x.numel(), bucket, codes.data_ptr(), units.data_ptr())


def add_magnitudes_(
    payloads: Sequence[Sequence[Tensor]], bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.two_magnitudes`."""
    _ADD(*columns(payloads), bucket, weight, fresh, out.data_ptr(), out.numel())
