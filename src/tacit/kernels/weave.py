"""The compiled half of `merge`: weave two lists, find what both have, and what arrived of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled, inlined

DIGIT = 11
"""Bits of a magnitude that are looked at together."""


@inlined
def _rank(pattern: Any, mask: Any, infinity: Any) -> Any:
    """A magnitude as a whole number of the same order; 0 for NaN, which is smaller than everything."""
    magnitude = np.int64(pattern) & mask
    return np.int64(0) if magnitude > infinity else magnitude + 1


@inlined
def _woven(a: Any, x: Any, b: Any, y: Any, at: Any, values: Any) -> Any:
    """All entries of both, in order; where both have a position, their sum. How many there are."""
    i: Any = 0
    j: Any = 0
    n = 0
    none = x.dtype.type(0)
    while i < a.shape[0] and j < b.shape[0]:
        p, q = a[i], b[j]
        left, right = p <= q, q <= p
        at[n] = min(p, q)
        values[n] = (x[i] if left else none) + (y[j] if right else none)
        i += np.int64(left)
        j += np.int64(right)
        n += 1
    for rest in range(i, a.shape[0]):
        at[n], values[n] = a[rest], x[rest]
        n += 1
    for rest in range(j, b.shape[0]):
        at[n], values[n] = b[rest], y[rest]
        n += 1
    return n


@inlined
def _least(patterns: Any, k: Any, mask: Any, infinity: Any) -> Any:
    """The k-th largest rank, and how many of it are among the k; digit by digit, by counting."""
    counts = np.empty(1 << DIGIT, np.int64)
    shift, left, found = 22 if mask < 1 << 32 else 55, k, np.int64(0)
    while True:
        counts[:] = 0
        above = min(shift + DIGIT, 63)
        for i in range(patterns.shape[0]):
            rank = _rank(patterns[i], mask, infinity)
            if rank >> above == found:
                counts[(rank >> shift) & (counts.shape[0] - 1)] += 1
        digit = counts.shape[0] - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        found = (found << DIGIT) | digit
        if shift == 0:
            return found, left
        shift -= DIGIT


def _merge(
    a: Any, x: Any, b: Any, y: Any, k: Any, at: Any, values: Any, patterns: Any, mask: Any, infinity: Any
) -> Any:
    """Weave, and move the k largest to the front. `patterns`: `values` once more, as whole numbers."""
    n = _woven(a, x, b, y, at, values)
    if n <= k:
        return n
    least, equal = _least(patterns[:n], k, mask, infinity)
    kept: Any = 0
    for i in range(n):
        rank = _rank(patterns[i], mask, infinity)
        tied = rank == least and equal > 0
        equal -= np.int64(tied)
        at[kept], values[kept] = at[i], values[i]
        kept += np.int64(rank > least or tied)
    return kept


def _common(a: Any, b: Any, at: Any, places: Any) -> Any:
    """What both have: the positions, and where in `b` they are. `at` may be `a`. How many."""
    i: Any = 0
    j: Any = 0
    n: Any = 0
    while i < a.shape[0] and j < b.shape[0]:
        p, q = a[i], b[j]
        at[n], places[n] = p, j
        n += np.int64(p == q)
        i += np.int64(p <= q)
        j += np.int64(q <= p)
    return n


def _divide(a: Any, x: Any, arrived: Any, at: Any, values: Any, new_residual: Any) -> Any:
    """Entries that have arrived go to `at` and `values`; the others add to `owed`, if it is not empty."""
    j, n = 0, 0
    for i in range(a.shape[0]):
        while j < arrived.shape[0] and arrived[j] < a[i]:
            j += 1
        if j < arrived.shape[0] and arrived[j] == a[i]:
            at[n], values[n] = a[i], x[i]
            n += 1
        elif new_residual.shape[0]:
            new_residual[a[i]] += x[i]
    return n


_LIST = "int32[::1]"
_KINDS = (("float32", "int32"), ("float64", "int64"))
merge = compiled(
    _merge,
    [
        f"int64({_LIST}, {x}[::1], {_LIST}, {x}[::1], int64, {_LIST}, {x}[::1], {bits}[::1], int64, int64)"
        for x, bits in _KINDS
    ],
)
common = compiled(_common, [f"int64({_LIST}, {_LIST}, {_LIST}, {_LIST})"])
divide = compiled(
    _divide, [f"int64({_LIST}, {x}[::1], {_LIST}, {_LIST}, {x}[::1], {x}[::1])" for x, _ in _KINDS]
)
