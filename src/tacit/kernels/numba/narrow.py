"""`kernels.narrow` by numba: one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.numba.jit import compile_now
from tacit.kernels.numba.primitives import MAGNITUDE, philox_words

BLOCK, LANES = 512, 64
INFINITY, NAN = np.uint32(0x7F800000), np.uint16(0x7FC0)


def _round(patterns: Any, seed: Any, out: Any) -> None:
    """Add random bits to the lower half, and keep the upper one."""
    words = np.empty(4 * LANES, np.uint32)
    random = words.view(np.uint16)
    for b in range((patterns.shape[0] + BLOCK - 1) // BLOCK):
        pattern, put = patterns[b * BLOCK : (b + 1) * BLOCK], out[b * BLOCK : (b + 1) * BLOCK]
        philox_words(seed, b * LANES, (pattern.shape[0] + 7) >> 3, words)
        for i in range(pattern.shape[0]):
            above = np.uint16(np.uint32(pattern[i] + np.uint32(random[i])) >> np.uint32(16))
            put[i] = NAN if (pattern[i] & np.uint32(MAGNITUDE)) > INFINITY else above


_ROUND = compile_now(_round, ["void(uint32[::1], uint64, uint16[::1])"])


def round_at_random(x: Tensor, seed: int, out: Tensor) -> None:
    """See `kernels.narrow`."""
    _ROUND(x.detach().numpy().view("u4"), seed, out.view(torch.int16).numpy().view("u2"))
