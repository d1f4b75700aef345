"""What the Triton kernels share; see `numba.primitives` for the same on the CPU."""

from __future__ import annotations

import triton.language as tl
from triton.language import tensor

from tacit.kernels.triton.launch import jit

SMALLEST_UNIT, LARGEST = tl.constexpr(2.0**-126), tl.constexpr(3.4e38)
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23."""
MAGNITUDE, INFINITY, NAN = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)


@jit
def load(x: tensor, at: tensor, mask: tensor) -> tensor:
    """The entries at `at`, in fp32, whatever their type; 0 where they are masked. bf16 comes as int16."""
    if x.dtype.element_ty == tl.int16:
        return (tl.load(x + at, mask, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.load(x + at, mask, 0.0).to(tl.float32)


@jit
def round_to(value: tensor, like: tensor) -> tensor:
    """Rounded to the type that the pointer `like` points to, to the even one of two; in fp32."""
    if like.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(value == value, bits, NAN).to(tl.float32, bitcast=True)
    return value.to(like.dtype.element_ty).to(tl.float32)


@jit
def store(x: tensor, at: tensor, value: tensor, mask: tensor) -> None:
    """Write fp32 numbers, rounded to the type that `x` points to."""
    if x.dtype.element_ty == tl.int16:
        tl.store(x + at, (round_to(value, x).to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask)
    else:
        tl.store(x + at, value.to(x.dtype.element_ty), mask)


@jit
def load_sum(x: tensor, residual: tensor, at: tensor, mask: tensor, HAS_RESIDUAL: tl.constexpr) -> tensor:
    """x, or x + residual, rounded to their type; in fp32."""
    a = load(x, at, mask)
    if HAS_RESIDUAL:
        a = round_to(a + load(residual, at, mask), x)
    return a


@jit
def magnitude_rank(a: tensor) -> tensor:
    """An integer of 31 bits that grows with the magnitude; 0 for NaN."""
    pattern = a.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.where(pattern > INFINITY, 0, pattern + 1)


@jit
def safe_inverse(unit: tensor) -> tensor:
    """1 / unit, or 0 where that would overflow."""
    large = unit >= SMALLEST_UNIT  # so not NaN
    return tl.where(large, tl.div_rn(1.0, tl.where(large, unit, 1.0)), 0.0)


@jit
def nearest_integer(x: tensor) -> tensor:
    """Rounded to the even one of two, up to 2^22: the sum has no bits left for fractions."""
    return (x + ROUNDER) - ROUNDER


@jit
def negate(x: tensor) -> tensor:
    """-x, also of zero: Triton's own minus is 0 - x."""
    return x * -1.0


@jit
def cap(x: tensor) -> tensor:
    """At most 3.4e38; so is NaN, so that it shows in a payload."""
    return tl.where(x <= LARGEST, x, LARGEST)


@jit
def largest_magnitude(x: tensor) -> tensor:
    """The largest magnitude of each row, at most 3.4e38; what is not finite counts as 3.4e38."""
    patterns = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return cap(tl.max(patterns, axis=1).to(tl.float32, bitcast=True))


@jit
def sum_by_halves(partial: tensor, HALVINGS: tl.constexpr) -> tensor:
    """The sum of each row of 2^HALVINGS numbers, in halves, as the references add them.

    A sum of two does not depend on their order, so each halving has only one result.
    """
    for _ in tl.static_range(HALVINGS):
        partial = tl.sum(partial.reshape(partial.shape[0], 2, partial.shape[1] // 2), axis=1)
    return partial.reshape(partial.shape[0])


@jit
def random_uint16(key0: tensor, key1: tensor, start: tensor, lanes: tensor, place: tensor) -> tensor:
    """16 random bits for the entries at `place`, of rows whose counters begin at `start`; see `philox`."""
    word = place >> 1
    which = (word >= lanes).to(tl.int32) + (word >= 2 * lanes) + (word >= 3 * lanes)
    counter = start + (word - which * lanes)
    seed = (key1.to(tl.uint32).to(tl.uint64) << 32) | key0.to(tl.uint32).to(tl.uint64)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0)
    random32 = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    return tl.where((place & 1) != 0, random32 >> 16, random32 & 0xFFFF).to(tl.int32)


@jit
def codes_of(
    codes: tensor, lanes: tensor, mask: tensor, j: tensor, BITS: tl.constexpr, GROUP: tl.constexpr,
    WORD: tl.constexpr,
) -> tensor:  # fmt: skip
    """Code `j` of each lane, whose first bytes lie at `codes`; each byte is read once."""
    if GROUP == 5:  # digits of three: a byte is divided by 3^j by multiplying
        inverse = tl.where(j == 0, 65536, tl.where(j == 1, 21846, tl.where(j == 2, 7282, 2428)))
        inverse = tl.where(j < 4, inverse, 810)
        quotient = (tl.load(codes, mask, 0).to(tl.int32) * inverse) >> 16
        return quotient - ((quotient * 21846) >> 16) * 3
    word = tl.load(codes, mask, 0).to(WORD)
    for k in tl.static_range(1, BITS * GROUP // 8):
        word |= tl.load(codes + k * lanes, mask, 0).to(WORD) << (8 * k)
    return ((word >> (BITS * j)) & ((1 << BITS) - 1)).to(tl.int32)


@jit
def level_of(code: tensor, BITS: tl.constexpr) -> tensor:
    """The level, in fp32: by the bits of 2^23 + code.

    Of a difference of integers LLVM makes one of 16 bits, of which ptxas 13.0 leaves out every other one.
    """
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ((1 << (BITS - 1)) - 1))
