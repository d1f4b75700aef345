"""Buckets of 512 entries in levels of 2, 4 or 8 bits, 64 entries at a time: the usual case of `quantize`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tacit.kernels.jit import inlined
from tacit.kernels.parts import MAGNITUDE
from tacit.kernels.philox import MULTIPLIERS, ROUNDS, WEYL
from tacit.kernels.vectors import (
    LANES,
    SHORTS,
    SIZE,
    all_bytes,
    as_floats,
    floats,
    folded,
    ints,
    largest,
    load_bytes,
    load_floats,
    low_bytes,
    number,
    pattern,
    pick,
    signed,
    spread,
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


@intrinsic  # type: ignore[untyped-decorator]
def drawn(typing_context: Any, seed: Any, first: Any) -> Any:
    """Philox: four times 64 halfwords, of the words 0 to 3 of 32 counters.

    What overflows into the high halves of the 64 bits that each word is held in is let be.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(ir.IntType(64), COUNTERS)

        def all_of(value: int) -> Any:
            return ir.Constant(wide, [value] * COUNTERS)

        def high(x: Any) -> Any:
            return builder.lshr(x, all_of(32))

        def times(x: Any, factor: int) -> Any:
            return builder.mul(builder.and_(x, all_of(0xFFFFFFFF)), all_of(factor))

        def mixed(product: Any, x: Any, key: Any) -> Any:
            return builder.xor(builder.xor(high(product), x), spread(builder, key, COUNTERS))

        a = builder.add(spread(builder, args[1], COUNTERS), ir.Constant(wide, list(range(COUNTERS))))
        b, c, d = high(a), all_of(0), all_of(0)
        keys = [args[0], builder.lshr(args[0], ir.IntType(64)(32))]
        for _ in range(ROUNDS):
            p, q = times(a, MULTIPLIERS[0]), times(c, MULTIPLIERS[1])
            a, b, c, d = mixed(q, b, keys[0]), q, mixed(p, d, keys[1]), p
            keys = [builder.add(key, ir.IntType(64)(step)) for key, step in zip(keys, WEYL, strict=True)]
        narrow = ir.VectorType(ir.IntType(32), COUNTERS)
        halves = context.get_value_type(SHORTS)
        words = [builder.bitcast(builder.trunc(word, narrow), halves) for word in (a, b, c, d)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(SHORTS, 4)(types.uint64, types.uint64), generate


@inlined
def leveled(at: Any, inverse: Any, top: Any, random: Any) -> Any:
    """Levels of 64 entries by stochastic rounding, counted from 0."""
    u = as_floats(widened(random)) * floats(STEP) + floats(OFFSET + top)
    level = load_floats(at) * floats(inverse) + u
    most = floats(top + top)
    level = pick(level < most, level, most)
    level = pick(level < floats(np.float32(0)), floats(np.float32(0)), level)
    return low_bytes(truncated(level))


@inlined
def bucket_coded(at: Any, inverse: Any, top: Any, seed: Any, first: Any, bits: Any, codes: Any) -> None:
    """The levels of a bucket, packed; see `layout`. Random halfwords in the order of `philox.halves`."""
    four, two, six = all_bytes(np.uint8(4)), all_bytes(np.uint8(2)), all_bytes(np.uint8(6))
    for half in range(2):
        r0, r1, r2, r3 = drawn(seed, np.uint64(first + half * COUNTERS))
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
