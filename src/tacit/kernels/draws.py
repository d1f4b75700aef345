"""Buckets of 512 entries in levels of 2, 4 or 8 bits, 64 entries at a time: the usual case of `quantize`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import inlined
from tacit.kernels.parts import HALF, LOW, M0, M1, MAGNITUDE, W0, W1
from tacit.kernels.philox import ROUNDS
from tacit.kernels.vectors import (
    LANES,
    SIZE,
    all_bytes,
    as_floats,
    counted,
    floats,
    floor,
    folded,
    halfwords,
    ints,
    largest,
    load_bytes,
    load_floats,
    longs,
    low_bytes,
    low_words,
    number,
    pattern,
    pick,
    signed,
    store,
    truncated,
    widened,
)

BUCKET, VECTORS, COUNTERS = 512, 8, 32
STEP, OFFSET = np.float32(2.0**-16), np.float32(2.0**-17)


@inlined
def fast(bits: Any, bucket: Any) -> Any:
    """Whether whole buckets are for the functions below."""
    return bucket == BUCKET and (bits == 2 or bits == 4 or bits == 8)


@inlined
def most_of(at: Any) -> Any:
    """The largest magnitude."""
    most = ints(np.int32(0))
    for i in range(VECTORS):
        bits = pattern(load_floats(at + i * SIZE)) & ints(MAGNITUDE)
        most = pick(bits >= most, bits, most)
    return number(largest(most))


@inlined
def squares_of(at: Any, inverse: Any) -> Any:
    """The sum of (x / max)^2, added up in the order of the reference."""
    total = floats(np.float32(0))
    for i in range(VECTORS):
        y = load_floats(at + i * SIZE) * floats(inverse)
        total = total + y * y
    return folded(total)


@inlined
def drawn(seed: Any, first: Any) -> Any:
    """Four times 64 halfwords: the words 0 to 3 of 32 counters. What overflows into high halves is let be."""
    low, half, m0, m1 = longs(LOW), longs(HALF), longs(M0), longs(M1)
    a = counted(np.uint64(first))
    b, c, d = a >> half, longs(np.uint64(0)), longs(np.uint64(0))
    key0, key1 = seed & LOW, seed >> HALF
    for _ in range(ROUNDS):
        p, q = (a & low) * m0, (c & low) * m1
        a, b, c, d = (q >> half) ^ b ^ longs(key0), q, (p >> half) ^ d ^ longs(key1), p
        key0, key1 = (key0 + W0) & LOW, (key1 + W1) & LOW
    return (
        halfwords(low_words(a)),
        halfwords(low_words(b)),
        halfwords(low_words(c)),
        halfwords(low_words(d)),
    )


@inlined
def leveled(at: Any, inverse: Any, top: Any, random: Any) -> Any:
    """Levels of 64 entries by stochastic rounding, counted from 0."""
    u = as_floats(widened(random)) * floats(STEP) + floats(OFFSET)
    level = floor(load_floats(at) * floats(inverse) + u)
    level = pick(level < floats(top), level, floats(top))
    level = pick(level < floats(-top), floats(-top), level)
    return low_bytes(truncated(level + floats(top)))


@inlined
def bucket_coded(at: Any, inverse: Any, top: Any, seed: Any, first: Any, bits: Any, codes: Any) -> None:
    """The levels of a bucket, packed; see `layout`. Random halfwords in the order of `philox.halves`."""
    four, two, six = all_bytes(np.uint8(4)), all_bytes(np.uint8(2)), all_bytes(np.uint8(6))
    for half in range(2):
        r0, r1, r2, r3 = drawn(seed, first + half * COUNTERS)
        begin, to = at + half * SIZE, codes + half * LANES
        k0 = leveled(begin, inverse, top, r0)
        k1 = leveled(begin + 2 * SIZE, inverse, top, r1)
        k2 = leveled(begin + 4 * SIZE, inverse, top, r2)
        k3 = leveled(begin + 6 * SIZE, inverse, top, r3)
        if bits == 4:
            store(to, k0 | (k2 << four))
            store(to + 2 * LANES, k1 | (k3 << four))
        elif bits == 2:
            store(to, k0 | (k1 << two) | (k2 << four) | (k3 << six))
        else:
            store(to, k0)
            store(to + 2 * LANES, k1)
            store(to + 4 * LANES, k2)
            store(to + 6 * LANES, k3)


@inlined
def worth(code: Any, unit: Any, top: Any) -> Any:
    """Units times levels."""
    return floats(unit) * as_floats(signed(code - all_bytes(top)))


@inlined
def bucket_added(codes: Any, units: Any, begin: Any, bits: Any, fresh: Any, out: Any) -> None:
    """Add what all peers say of a bucket, whose codes begin at the byte `begin`, in their order."""
    top = np.uint8((1 << (bits - 1)) - 1)
    two, four, six = all_bytes(np.uint8(2)), all_bytes(np.uint8(4)), all_bytes(np.uint8(6))
    last = all_bytes(np.uint8(3))
    for q in range(bits):
        at = out + q * SIZE
        a0 = floats(np.float32(0)) if fresh else load_floats(at)
        if bits == 4:
            a1 = floats(np.float32(0)) if fresh else load_floats(at + 4 * SIZE)
            for peer in range(codes.shape[0]):
                code = load_bytes(codes[peer] + begin + q * LANES)
                a0 = a0 + worth(code & all_bytes(np.uint8(15)), units[peer], top)
                a1 = a1 + worth(code >> four, units[peer], top)
            store(at + 4 * SIZE, a1)
        elif bits == 2:
            a1 = floats(np.float32(0)) if fresh else load_floats(at + 2 * SIZE)
            a2 = floats(np.float32(0)) if fresh else load_floats(at + 4 * SIZE)
            a3 = floats(np.float32(0)) if fresh else load_floats(at + 6 * SIZE)
            for peer in range(codes.shape[0]):
                code = load_bytes(codes[peer] + begin + q * LANES)
                a0 = a0 + worth(code & last, units[peer], top)
                a1 = a1 + worth((code >> two) & last, units[peer], top)
                a2 = a2 + worth((code >> four) & last, units[peer], top)
                a3 = a3 + worth(code >> six, units[peer], top)
            store(at + 2 * SIZE, a1)
            store(at + 4 * SIZE, a2)
            store(at + 6 * SIZE, a3)
        else:
            for peer in range(codes.shape[0]):
                code = load_bytes(codes[peer] + begin + q * LANES)
                a0 = a0 + worth(code, units[peer], top)
        store(at, a0)
