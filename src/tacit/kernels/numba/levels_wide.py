"""The usual case of `levels`, 64 entries at a time: buckets of 512 entries, in codes of 2, 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tacit.kernels.numba.jit import inline
from tacit.kernels.numba.passes import write
from tacit.kernels.numba.primitives import MAGNITUDE
from tacit.kernels.numba.vectors import (
    LANES,
    SHORTS,
    VECTOR_BYTES,
    broadcast,
    byte_vector,
    float_bits,
    float_from_bits,
    float_vector,
    int_vector,
    largest_lane,
    load_bytes,
    load_floats,
    low_bytes,
    sign_extend,
    store,
    sum_by_halves,
    to_float,
    to_int,
    where,
    zero_extend,
)
from tacit.kernels.philox import MULTIPLIERS, ROUNDS, WEYL

BUCKET, VECTORS, COUNTERS = 512, 8, 32
STEP, OFFSET = np.float32(2.0**-16), np.float32(2.0**-17)


@inline
def takes_wide(bits: Any, bucket: Any) -> Any:
    """Whether the functions below are for whole buckets of this size."""
    return bucket == BUCKET and (bits == 2 or bits == 4 or bits == 8)


@inline
def wide_largest(at: Any) -> Any:
    """The largest magnitude of a bucket."""
    largest = int_vector(np.int32(0))
    for i in range(VECTORS):
        bits = float_bits(load_floats(at + i * VECTOR_BYTES)) & int_vector(MAGNITUDE)
        largest = where(bits >= largest, bits, largest)
    return float_from_bits(largest_lane(largest))


@inline
def wide_squares(at: Any, inverse: Any) -> Any:
    """The sum of (x / max)^2, added up in the order of the reference."""
    total = float_vector(np.float32(0))
    for i in range(VECTORS):
        y = load_floats(at + i * VECTOR_BYTES) * float_vector(inverse)
        total = total + y * y
    return sum_by_halves(total)


@intrinsic  # type: ignore[untyped-decorator]
def philox_uint16(typing_context: Any, seed: Any, first: Any) -> Any:
    """Four times 64 random numbers of 16 bits: the words 0 to 3 of 32 counters of Philox.

    Each word is computed in 64 bits; what overflows into the high half is ignored.
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
            return builder.xor(builder.xor(high(product), x), broadcast(builder, key, COUNTERS))

        a = builder.add(broadcast(builder, args[1], COUNTERS), ir.Constant(wide, list(range(COUNTERS))))
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


@inline
def round_at_random(at: Any, inverse: Any, top: Any, random: Any) -> Any:
    """Levels of 64 entries by stochastic rounding, counted from 0."""
    u = to_float(zero_extend(random)) * float_vector(STEP) + float_vector(OFFSET + top)
    level = load_floats(at) * float_vector(inverse) + u
    largest = float_vector(top + top)
    level = where(level < largest, level, largest)
    level = where(level < float_vector(np.float32(0)), float_vector(np.float32(0)), level)
    return low_bytes(to_int(level))


@inline
def wide_encode(at: Any, inverse: Any, top: Any, seed: Any, first: Any, bits: Any, codes: Any) -> None:
    """The codes of a bucket, packed as in `layout`; random bits in the order of `philox.random_uint16`."""
    four, two, six = byte_vector(np.uint8(4)), byte_vector(np.uint8(2)), byte_vector(np.uint8(6))
    for half in range(2):
        r0, r1, r2, r3 = philox_uint16(seed, np.uint64(first + half * COUNTERS))
        begin, to = at + half * VECTOR_BYTES, codes + half * LANES
        k0 = round_at_random(begin, inverse, top, r0)
        k1 = round_at_random(begin + 2 * VECTOR_BYTES, inverse, top, r1)
        k2 = round_at_random(begin + 4 * VECTOR_BYTES, inverse, top, r2)
        k3 = round_at_random(begin + 6 * VECTOR_BYTES, inverse, top, r3)
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


@inline
def decoded(code: Any, unit: Any, top: Any) -> Any:
    """Units times levels."""
    return float_vector(unit) * to_float(sign_extend(code - byte_vector(top)))


@inline
def wide_add(codes: Any, units: Any, begin: Any, bits: Any, fresh: Any, out: Any, past_caches: Any) -> None:
    """Add what all peers sent of a bucket, whose codes begin at the byte `begin`, in order."""
    top = np.uint8((1 << (bits - 1)) - 1)
    two, four, six = byte_vector(np.uint8(2)), byte_vector(np.uint8(4)), byte_vector(np.uint8(6))
    last = byte_vector(np.uint8(3))
    for q in range(bits):
        at = out + q * VECTOR_BYTES
        a0 = float_vector(np.float32(0)) if fresh else load_floats(at)
        if bits == 4:
            a1 = float_vector(np.float32(0)) if fresh else load_floats(at + 4 * VECTOR_BYTES)
            for peer in range(codes.shape[0]):
                code = load_bytes(codes[peer] + begin + q * LANES)
                a0 = a0 + decoded(code & byte_vector(np.uint8(15)), units[peer], top)
                a1 = a1 + decoded(code >> four, units[peer], top)
            write(at + 4 * VECTOR_BYTES, a1, past_caches)
        elif bits == 2:
            a1 = float_vector(np.float32(0)) if fresh else load_floats(at + 2 * VECTOR_BYTES)
            a2 = float_vector(np.float32(0)) if fresh else load_floats(at + 4 * VECTOR_BYTES)
            a3 = float_vector(np.float32(0)) if fresh else load_floats(at + 6 * VECTOR_BYTES)
            for peer in range(codes.shape[0]):
                code = load_bytes(codes[peer] + begin + q * LANES)
                a0 = a0 + decoded(code & last, units[peer], top)
                a1 = a1 + decoded((code >> two) & last, units[peer], top)
                a2 = a2 + decoded((code >> four) & last, units[peer], top)
                a3 = a3 + decoded(code >> six, units[peer], top)
            write(at + 2 * VECTOR_BYTES, a1, past_caches)
            write(at + 4 * VECTOR_BYTES, a2, past_caches)
            write(at + 6 * VECTOR_BYTES, a3, past_caches)
        else:
            for peer in range(codes.shape[0]):
                code = load_bytes(codes[peer] + begin + q * LANES)
                a0 = a0 + decoded(code, units[peer], top)
        write(at, a0, past_caches)
