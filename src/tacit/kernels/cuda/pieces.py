"""What the Triton kernels are made of; see `parts` for the same on the CPU."""

from __future__ import annotations

import triton.language as tl
from triton.language import tensor

from tacit.kernels.cuda.launch import jitted

TINY, HUGE = tl.constexpr(2.0**-126), tl.constexpr(3.4e38)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@jitted
def inverted(unit: tensor) -> tensor:
    """1 / unit, or 0 where that would overflow."""
    tiny = unit < TINY
    return tl.where(tiny, 0.0, tl.div_rn(1.0, tl.where(tiny, 1.0, unit)))


@jitted
def negated(x: tensor) -> tensor:
    """-x, also of zero: Triton's own minus is 0 - x."""
    return x * -1.0


@jitted
def capped(x: tensor) -> tensor:
    """At most 3.4e38; a NaN stays one."""
    return tl.where(x > HUGE, HUGE, x)


@jitted
def largest(x: tensor) -> tensor:
    """The largest magnitude of each row, at most 3.4e38; NaN, where there is one."""
    patterns = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return capped(tl.max(patterns, axis=1).to(tl.float32, bitcast=True))


@jitted
def folded(partial: tensor, HALVINGS: tl.constexpr) -> tensor:
    """The sum of each row of 2^HALVINGS numbers, in halves, as the references add them.

    A sum of two does not depend on their order, so each halving has only one result.
    """
    for _ in tl.static_range(HALVINGS):
        partial = tl.sum(partial.reshape(partial.shape[0], 2, partial.shape[1] // 2), axis=1)
    return partial.reshape(partial.shape[0])


@jitted
def drawn(key0: tensor, key1: tensor, start: tensor, lanes: tensor, place: tensor) -> tensor:
    """16 random bits for the entries at `place`, of rows whose counters begin at `start`; see `philox`."""
    word = place >> 1
    which = (word >= lanes).to(tl.int32) + (word >= 2 * lanes) + (word >= 3 * lanes)
    counter = start + (word - which * lanes)
    seed = (key1.to(tl.uint32).to(tl.uint64) << 32) | key0.to(tl.uint32).to(tl.uint64)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, low * 0, low * 0)
    drawn32 = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    return tl.where((place & 1) != 0, drawn32 >> 16, drawn32 & 0xFFFF).to(tl.int32)
