"""What the compiled kernels share. Loops run over slices, from 0 on, or they are not vectorised."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.numba.jit import inline
from tacit.kernels.philox import MULTIPLIERS, ROUNDS, WEYL

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
M0, M1 = (np.uint64(each) for each in MULTIPLIERS)
W0, W1 = (np.uint64(each) for each in WEYL)
MAGNITUDE = np.int32(0x7FFFFFFF)
SMALLEST_UNIT, LARGEST = np.float32(2.0**-126), np.float32(3.4e38)


@inline
def philox_words(seed: Any, first: Any, lanes: Any, words: Any) -> None:
    """Philox: the words 0 of `lanes` counters, the first of which is `first`; then their words 1, 2 and 3."""
    for i in range(lanes):
        at: Any = np.uint64(first + i)
        a, b, c, d = at & LOW, at >> HALF, np.uint64(0), np.uint64(0)
        key0, key1 = seed & LOW, seed >> HALF
        for _ in range(ROUNDS):
            p, q = a * M0, c * M1
            a, b, c, d = (q >> HALF) ^ b ^ key0, q & LOW, (p >> HALF) ^ d ^ key1, p & LOW
            key0, key1 = (key0 + W0) & LOW, (key1 + W1) & LOW
        words[i] = a
        words[lanes + i] = b
        words[2 * lanes + i] = c
        words[3 * lanes + i] = d


@inline
def largest_pattern(patterns: Any) -> Any:
    """The bits of the largest magnitude: integers are compared eight and more at a time."""
    most = np.int32(0)
    for i in range(patterns.shape[0]):
        most = max(most, patterns[i] & MAGNITUDE)
    return most


@inline
def capped(magnitude: Any) -> Any:
    """At most 3.4e38; so is NaN, so that it shows in a payload."""
    return magnitude if magnitude <= LARGEST else LARGEST


@inline
def safe_inverse(unit: Any) -> Any:
    """1 / unit, or 0 where that would overflow: such a bucket sends zeros."""
    return np.float32(1) / unit if unit >= SMALLEST_UNIT else np.float32(0)


@inline
def sum_by_halves(partial: Any) -> Any:
    """The sum of 2^k numbers, in halves, as the references add them; `partial` is overwritten."""
    width = partial.shape[0]
    while width > 1:
        width //= 2
        left, right = partial[:width], partial[width : 2 * width]
        for i in range(left.shape[0]):
            left[i] += right[i]
    return partial[0]


@inline
def pack_signs(piece: Any, lanes: Any, bits: Any) -> None:
    """One bit an entry, 1 where it is not negative; see `layout`."""
    if piece.shape[0] < 8 * lanes:
        bits[:] = 0
    for j in range(8):
        part = piece[j * lanes : (j + 1) * lanes]
        if j == 0:
            for i in range(part.shape[0]):
                bits[i] = np.uint8(part[i] >= 0)
        else:
            for i in range(part.shape[0]):
                bits[i] |= np.uint8(np.uint8(part[i] >= 0) << j)
