"""`kernels.exponents` by numba: round to powers of two in one pass; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import columns
from tacit.kernels.numba.jit import compile_now
from tacit.kernels.numba.pointers import bytes_at
from tacit.kernels.numba.primitives import MAGNITUDE, pack_signs, philox_words

BLOCK, LANES = 512, 64


def _encode(x: Any, patterns: Any, seed: Any, exponents: Any, bits: Any) -> None:
    """Add random bits below the exponent, and keep what carries into it."""
    words = np.empty(4 * LANES, np.uint32)
    random = words.view(np.uint16)
    for b in range((x.shape[0] + BLOCK - 1) // BLOCK):
        piece, pattern = x[b * BLOCK : (b + 1) * BLOCK], patterns[b * BLOCK : (b + 1) * BLOCK]
        out = exponents[b * BLOCK : (b + 1) * BLOCK]
        lanes = (piece.shape[0] + 7) >> 3
        philox_words(seed, b * LANES, lanes, words)
        for i in range(piece.shape[0]):
            below = np.int32((np.int32(random[i]) << 7) + 64)
            carried = np.int32(np.int32(pattern[i] & MAGNITUDE) + below)
            out[i] = np.uint8(min(np.int32(carried >> 23), np.int32(254)))
        pack_signs(piece, lanes, bits[b * LANES : b * LANES + lanes])


def _add(exponents: Any, bits: Any, weight: Any, fresh: Any, out: Any) -> None:
    """Add `weight` times what each peer sent, decoded, in order."""
    power = np.empty(LANES, np.int32)
    value = power.view(np.float32)
    for b in range((out.shape[0] + BLOCK - 1) // BLOCK):
        target = out[b * BLOCK : (b + 1) * BLOCK]
        lanes = (target.shape[0] + 7) >> 3
        if fresh:
            target[:] = 0
        for peer in range(bits.shape[0]):
            exponent = bytes_at(exponents[peer], b * BLOCK, target.shape[0])
            sign = bytes_at(bits[peer], b * LANES, lanes)
            for j in range(8):
                part, plane = target[j * lanes : (j + 1) * lanes], exponent[j * lanes : (j + 1) * lanes]
                mask = np.uint8(1 << j)
                for i in range(part.shape[0]):
                    power[i] = np.int32(plane[i]) << 23
                for i in range(part.shape[0]):
                    part[i] += weight * (value[i] if sign[i] & mask else -value[i])


_ENCODE = compile_now(_encode, ["void(float32[::1], int32[::1], uint64, uint8[::1], uint8[::1])"])
_ADD = compile_now(_add, ["void(int64[::1], int64[::1], float32, boolean, float32[::1])"])


def encode_exponents(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """See `kernels.exponents`."""
    array = x.detach().numpy()
    _ENCODE(array, array.view("i4"), seed, exponents.numpy(), bits.numpy())


def add_exponents_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """See `kernels.exponents`."""
    _ADD(*columns(payloads), weight, fresh, out.detach().numpy())
