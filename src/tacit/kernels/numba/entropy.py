"""`kernels.entropy` by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.numba.jit import compile_now

SCALE_BITS, STREAMS = 12, 8
SLOTS = 1 << SCALE_BITS
LOWEST = np.uint32(1 << 16)


def _count(symbols: Any, counts: Any) -> None:
    """How often each symbol occurs; in four columns, so that equal neighbours do not wait for each other."""
    n = symbols.shape[0]
    for i in range(0, n - 3, 4):
        for j in range(4):
            counts[j, symbols[i + j]] += 1
    for i in range(n - n % 4, n):
        counts[0, symbols[i]] += 1


def _encode(symbols: Any, freqs: Any, states: Any, words: Any) -> int:
    """Write the states in the end, and words from the end of `words` backwards; how many words that were."""
    starts = np.zeros(freqs.shape[0], np.uint32)
    for s in range(1, freqs.shape[0]):
        starts[s] = starts[s - 1] + freqs[s - 1]
    limits = np.empty(freqs.shape[0], np.uint64)
    for s in range(freqs.shape[0]):
        limits[s] = np.uint64(freqs[s]) << np.uint64(32 - SCALE_BITS)
    states[:] = LOWEST
    at = words.shape[0]
    n = symbols.shape[0]
    for back in range(n):
        i = n - 1 - back
        s = symbols[i]
        x = states[i & (STREAMS - 1)]
        if np.uint64(x) >= limits[s]:
            at -= 1
            words[at] = np.uint16(x & np.uint32(0xFFFF))
            x = np.uint32(x >> np.uint32(16))
        f = freqs[s]
        q = np.uint32(x // f)
        states[i & (STREAMS - 1)] = np.uint32((q << np.uint32(SCALE_BITS)) + (x - q * f) + starts[s])
    return int(words.shape[0] - at)


def _decode(freqs: Any, states: Any, words: Any, symbols: Any) -> bool:
    """Write the symbols; whether all words were used, and the states are those of the beginning."""
    slots = np.empty(SLOTS, np.uint64)
    slot = 0
    for s in range(freqs.shape[0]):
        for k in range(freqs[s]):
            slots[slot] = (np.uint64(freqs[s]) << np.uint64(32)) | np.uint64(k << 8) | np.uint64(s)
            slot += 1
    at, most = 0, words.shape[0] - 1
    x = np.empty(STREAMS, np.uint32)
    x[:] = states
    n = symbols.shape[0]
    for i in range(n):
        j = i & (STREAMS - 1)
        entry = slots[x[j] & np.uint32(SLOTS - 1)]
        symbols[i] = np.uint8(entry & np.uint64(0xFF))
        y = np.uint32(
            (entry >> np.uint64(32)) * np.uint64(x[j] >> np.uint32(SCALE_BITS))
            + ((entry >> np.uint64(8)) & np.uint64(0xFFFFFF))
        )
        if y < LOWEST:
            y = np.uint32((y << np.uint32(16)) | np.uint32(words[min(at, most)]))
            at += 1
        x[j] = y
    good = at == most + 1 or (most < 0 and at == 0)
    for j in range(STREAMS):
        good = good and x[j] == LOWEST
    return bool(good)


_BYTES, _WORDS, _STATES = "uint8[::1]", "uint16[::1]", "uint32[::1]"
count = compile_now(_count, [f"void({_BYTES}, int64[:,::1])"])
encode = compile_now(_encode, [f"int64({_BYTES}, {_STATES}, {_STATES}, {_WORDS})"])
decode = compile_now(_decode, [f"boolean({_STATES}, {_STATES}, {_WORDS}, {_BYTES})"])
