"""`kernels.merge` by numba: merge two sorted lists, find common entries, and which of this rank's arrived."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.dispatch import arrays
from tacit.kernels.entry_buffers import EntryBuffer, Selection, first_of
from tacit.kernels.numba.jit import compile_now, inline

DIGIT = 11
"""Bits of a magnitude that are counted together."""


@inline
def _rank(pattern: Any, mask: Any, infinity: Any) -> Any:
    """A magnitude as an integer of the same order; 0 for NaN, which is smaller than everything."""
    magnitude = np.int64(pattern) & mask
    return np.int64(0) if magnitude > infinity else magnitude + 1


@inline
def _add_lists(a: Any, x: Any, b: Any, y: Any, at: Any, values: Any) -> Any:
    """All entries of both lists, in order, added up where both have a position; how many."""
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


@inline
def _kth_largest(patterns: Any, k: Any, mask: Any, infinity: Any) -> Any:
    """The k-th largest rank, and how many of that rank are among the k; digit by digit, by counting."""
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
    """Add the lists, move the k largest to the front; how many. `patterns` is `values`, read as integers."""
    n = _add_lists(a, x, b, y, at, values)
    if n <= k:
        return n
    least, equal = _kth_largest(patterns[:n], k, mask, infinity)
    kept: Any = 0
    for i in range(n):
        rank = _rank(patterns[i], mask, infinity)
        tied = rank == least and equal > 0
        equal -= np.int64(tied)
        at[kept], values[kept] = at[i], values[i]
        kept += np.int64(rank > least or tied)
    return kept


def _common_positions(a: Any, b: Any, at: Any, where: Any) -> Any:
    """The positions that both have, and where in `b` they are; how many. `at` may be `a`."""
    i: Any = 0
    j: Any = 0
    n: Any = 0
    while i < a.shape[0] and j < b.shape[0]:
        p, q = a[i], b[j]
        at[n], where[n] = p, j
        n += np.int64(p == q)
        i += np.int64(p <= q)
        j += np.int64(q <= p)
    return n


def _keep_arrived(a: Any, x: Any, arrived: Any, at: Any, values: Any, residual: Any) -> Any:
    """Entries that have arrived go to `at` and `values`; the others add to `residual`, unless it is empty."""
    j, n = 0, 0
    for i in range(a.shape[0]):
        while j < arrived.shape[0] and arrived[j] < a[i]:
            j += 1
        if j < arrived.shape[0] and arrived[j] == a[i]:
            at[n], values[n] = a[i], x[i]
            n += 1
        elif residual.shape[0]:
            residual[a[i]] += x[i]
    return n


_LIST = "int32[::1]"
_KINDS = (("float32", "int32"), ("float64", "int64"))
_MERGE = compile_now(
    _merge,
    [
        f"int64({_LIST}, {x}[::1], {_LIST}, {x}[::1], int64, {_LIST}, {x}[::1], {bits}[::1], int64, int64)"
        for x, bits in _KINDS
    ],
)
_COMMON = compile_now(_common_positions, [f"int64({_LIST}, {_LIST}, {_LIST}, {_LIST})"])
_KEEP = compile_now(
    _keep_arrived, [f"int64({_LIST}, {x}[::1], {_LIST}, {_LIST}, {x}[::1], {x}[::1])" for x, _ in _KINDS]
)
_PATTERNS = {
    torch.float32: (torch.int32, (1 << 31) - 1, 0xFF << 23),
    torch.float64: (torch.int64, (1 << 63) - 1, 0x7FF << 52),
}
"""The integers of the same size as a type; all their bits but the sign; the bits of infinity."""


def merge_largest(one: Selection, other: Selection, k: int, buffer: EntryBuffer) -> Selection:
    """See `kernels.merge`."""
    integers, mask, infinity = _PATTERNS[buffer.values.dtype]
    given, to = arrays(*one, *other), arrays(*buffer, buffer.values.view(integers))
    return first_of(buffer, _MERGE(*given, k, *to, mask, infinity))


def common_positions(one: Tensor, other: Tensor, positions: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.merge`."""
    count = _COMMON(*arrays(one, other, positions, where))
    return positions[:count], where[:count]


def keep_arrived(
    own: Selection, arrived: Tensor, buffer: EntryBuffer, residual: Tensor | None = None
) -> Selection:
    """See `kernels.merge`."""
    rest = own.values[:0] if residual is None else residual
    return first_of(buffer, _KEEP(*arrays(*own, arrived, *buffer, rest)))
