"""`kernels.entropy` in numpy, all streams of a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE_BITS, STREAMS, COLUMNS = 15, 8, 4
SLOTS, LOWEST = 1 << SCALE_BITS, 1 << 16

LANES = 64
"""Groups of three bytes in a block of 512 codes of 3 bits."""

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
Numbers = NDArray[np.uint32]


def split(codes: Bytes, groups: Bytes) -> None:
    """`numba.entropy.split`."""
    for start, stop, lanes in _alike(len(codes)):
        a, b, c = np.moveaxis(codes[start:stop].reshape(-1, 3, lanes), 1, 0).astype(np.uint32)
        word = a | b << 8 | c << 16
        pairs = np.stack([word >> 6 * j & 63 for j in range(4)], 1)
        groups[start // 3 * 4 : stop // 3 * 4] = pairs.reshape(-1)


def join(groups: Bytes, codes: Bytes) -> None:
    """`numba.entropy.join`."""
    for start, stop, lanes in _alike(len(codes)):
        pairs = groups[start // 3 * 4 : stop // 3 * 4].reshape(-1, 4, lanes).astype(np.uint32)
        word = sum(pairs[:, j] << 6 * j for j in range(4))
        codes[start:stop] = np.stack([word >> 8 * k & 255 for k in range(3)], 1).reshape(-1)


def _alike(size: int) -> Iterator[tuple[int, int, int]]:
    """(start byte, stop byte, number of lanes): of whole blocks of 3 bits, and of the last one."""
    whole = size - size % (3 * LANES)
    if whole:
        yield 0, whole, LANES
    if whole < size:
        yield whole, size, (size - whole) // 3


def count(groups: Bytes, counts: NDArray[np.int64]) -> None:
    """`numba.entropy.count`, in the first column."""
    counts[0] += np.bincount(groups, minlength=counts.shape[1])


def encode(
    groups: Bytes, piece: int, freqs: Numbers, states: Numbers, words: Words, counts: NDArray[np.int64]
) -> None:
    """`numba.entropy.encode`."""
    at = len(words)
    for p in reversed(range(len(states))):
        counts[p] = _encode(groups[p * piece : (p + 1) * piece], freqs, states[p], words[:at])
        at -= int(counts[p])


def _encode(groups: Bytes, freqs: Numbers, states: Numbers, words: Words) -> int:
    starts, at = np.cumsum(freqs) - freqs, len(words)
    x = np.full(STREAMS, LOWEST, np.uint64)
    for first in range(len(groups) - 1 - (len(groups) - 1) % STREAMS, -1, -STREAMS):
        some = groups[first : first + STREAMS]
        f, here = freqs[some].astype(np.uint64), slice(0, len(some))
        full = x[here] >= f << np.uint64(32 - SCALE_BITS)
        out = (x[here][full] & np.uint64(0xFFFF)).astype(np.uint16)
        at -= len(out)
        words[at : at + len(out)] = out
        x[here] = np.where(full, x[here] >> np.uint64(16), x[here])
        x[here] = (x[here] // f << np.uint64(SCALE_BITS)) + x[here] % f + starts[some].astype(np.uint64)
    states[:] = x
    return len(words) - at


def decode(
    freqs: Numbers, piece: int, states: Numbers, counts: NDArray[np.int64], words: Words, groups: Bytes
) -> bool:
    """`numba.entropy.decode`."""
    parts = np.split(words, np.cumsum(counts)[:-1])
    return all(
        _decode(freqs, states[p], part, groups[p * piece : (p + 1) * piece]) for p, part in enumerate(parts)
    )


def _decode(freqs: Numbers, states: Numbers, words: Words, groups: Bytes) -> bool:
    owner = np.repeat(np.arange(len(freqs), dtype=np.uint8), freqs)
    beyond = np.arange(SLOTS) - (np.cumsum(freqs) - freqs)[owner]
    x, at, padded = states.astype(np.uint64), 0, np.append(words, np.zeros(STREAMS, np.uint16))
    for first in range(0, len(groups), STREAMS):
        here = slice(0, min(STREAMS, len(groups) - first))
        slot = (x[here] & np.uint64(SLOTS - 1)).astype(np.int64)
        groups[first : first + STREAMS] = owner[slot]
        x[here] = freqs[owner[slot]] * (x[here] >> np.uint64(SCALE_BITS)) + beyond[slot].astype(np.uint64)
        low = x[here] < LOWEST
        if at > len(words):
            return False
        read = padded[at : at + int(low.sum())]
        shifted: Any = x[here].copy()
        shifted[low] = (shifted[low] << np.uint64(16)) | read.astype(np.uint64)
        x[here], at = shifted, at + len(read)
    return at == len(words) and bool((x == LOWEST).all())
