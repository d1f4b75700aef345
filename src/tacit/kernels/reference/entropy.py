"""`kernels.entropy` in numpy, all streams at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE_BITS, STREAMS = 12, 8
SLOTS, LOWEST = 1 << SCALE_BITS, 1 << 16

Words = NDArray[np.uint16]
Numbers = NDArray[np.uint32]


def encode(symbols: NDArray[np.uint8], freqs: Numbers, states: Numbers, words: Words) -> int:
    """`numba.entropy.encode`."""
    starts, at = np.cumsum(freqs) - freqs, len(words)
    x = np.full(STREAMS, LOWEST, np.uint64)
    for first in range(len(symbols) - 1 - (len(symbols) - 1) % STREAMS, -1, -STREAMS):
        group = symbols[first : first + STREAMS]
        f, here = freqs[group].astype(np.uint64), slice(0, len(group))
        full = x[here] >= f << np.uint64(32 - SCALE_BITS)
        out = (x[here][full] & np.uint64(0xFFFF)).astype(np.uint16)
        at -= len(out)
        words[at : at + len(out)] = out
        x[here] = np.where(full, x[here] >> np.uint64(16), x[here])
        x[here] = (x[here] // f << np.uint64(SCALE_BITS)) + x[here] % f + starts[group].astype(np.uint64)
    states[:] = x
    return len(words) - at


def decode(freqs: Numbers, states: Numbers, words: Words, symbols: NDArray[np.uint8]) -> bool:
    """`numba.entropy.decode`."""
    owner = np.repeat(np.arange(len(freqs), dtype=np.uint8), freqs)
    beyond = np.arange(SLOTS) - (np.cumsum(freqs) - freqs)[owner]
    x, at, padded = states.astype(np.uint64), 0, np.append(words, np.zeros(STREAMS, np.uint16))
    for first in range(0, len(symbols), STREAMS):
        here = slice(0, min(STREAMS, len(symbols) - first))
        slot = (x[here] & np.uint64(SLOTS - 1)).astype(np.int64)
        symbols[first : first + STREAMS] = owner[slot]
        x[here] = freqs[owner[slot]] * (x[here] >> np.uint64(SCALE_BITS)) + beyond[slot].astype(np.uint64)
        low = x[here] < LOWEST
        if at > len(words):
            return False
        read = padded[at : at + int(low.sum())]
        shifted: Any = x[here].copy()
        shifted[low] = (shifted[low] << np.uint64(16)) | read.astype(np.uint64)
        x[here], at = shifted, at + len(read)
    return at == len(words) and bool((x == LOWEST).all())
