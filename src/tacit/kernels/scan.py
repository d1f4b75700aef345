"""The compiled half of `select`: one pass that adds what is owed, finds what is large, and keeps the rest.

Of fp32 64 entries are looked at together, and only those that are found one by one; fp64 entry by entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled, inlined
from tacit.kernels.parts import MAGNITUDE
from tacit.kernels.pointers import floats_at, ints_at
from tacit.kernels.select import RUN, SPARE
from tacit.kernels.vectors import LANES, SIZE, floats, load_floats, lowest, magnitude, number, packed, store

PIECE = SPARE
"""Entries between two looks at whether there is still room."""
FIRST, THEN = 20, 10
"""Bits below the first and the second part of a magnitude's bits, which are ranked part by part."""


@inlined
def hit(
    x: Any, residual: Any, new_residual: Any, i: Any, threshold: Any, found: Any, index: Any, values: Any
) -> Any:
    """Look at the 64 entries from 64 i on; how many are found by then."""
    a = load_floats(x + i * SIZE)
    if residual:
        a = a + load_floats(residual + i * SIZE)
        store(new_residual + i * SIZE, a)
    hits = packed(magnitude(a) >= floats(threshold))
    entries = floats_at(new_residual if residual else x, i * LANES, LANES)
    while hits:
        j = lowest(hits)
        index[found] = np.int32(i * LANES + j)
        values[found] = entries[j]
        if residual:
            entries[j] = 0
        found += 1
        hits &= hits - 1
    return found


def _sift(
    x: Any, residual: Any, new_residual: Any, numel: Any, threshold: Any, index: Any, values: Any, places: Any
) -> Any:
    """Write a = x + residual to `owed`; where |a| >= threshold, 0, and its place to `index`, it to `values`.

    All by address; `residual` and `owed` may be 0.

    Returns:
        How many were found, or -1 where there was no room; `owed` is then unfinished.
    """
    at, entries, found = ints_at(index, 0, places), floats_at(values, 0, places), np.int64(0)
    whole, step = numel // LANES, PIECE // LANES
    for piece in range(0, whole, step):
        if found + PIECE > places:
            return np.int64(-1)
        for i in range(piece, min(piece + step, whole)):
            found = hit(x, residual, new_residual, i, threshold, found, at, entries)
    if found + LANES > places:
        return np.int64(-1)
    given, rest = floats_at(x, 0, numel), floats_at(new_residual, 0, numel)
    before = floats_at(residual, 0, numel)
    for i in range(whole * LANES, numel):
        a = given[i] + before[i] if residual else given[i]
        reached = abs(a) >= threshold
        if residual:
            rest[i] = np.float32(0) if reached else a
        at[found] = i
        entries[found] = a
        found += np.int64(reached)
    return found


def _sift_one_by_one(
    x: Any, residual: Any, new_residual: Any, threshold: Any, index: Any, values: Any
) -> Any:
    """`_sift` of fp64, an entry at a time; `residual` and `owed` may be empty."""
    found = np.int64(0)
    for piece in range(0, x.shape[0], PIECE):
        if found + PIECE > index.shape[0]:
            return -1
        for i in range(piece, min(piece + PIECE, x.shape[0])):
            a = x[i] + residual[i] if residual.shape[0] else x[i]
            reached = abs(a) >= threshold
            if residual.shape[0]:
                new_residual[i] = np.float64(0) if reached else a
            index[found] = i
            values[found] = a
            found += np.int64(reached)
    return found


# ---- the n-th largest ---------------------------------------------------------------------------------


@inlined
def ranked(counts: Any, n: Any) -> Any:
    """The part in which the n-th largest lies, and how many are in larger ones. `counts` is cleared."""
    larger, part = np.int64(0), np.int64(counts.shape[0] - 1)
    while part > 0 and larger + counts[part] < n:
        larger += counts[part]
        part -= 1
    counts[:] = 0
    return part, larger


def _nth(bits: Any, size: Any, n: Any) -> Any:
    """The bits of the n-th largest magnitude, and how many are larger. A NaN is larger than all."""
    patterns, counts = ints_at(bits, 0, size), np.zeros(2048, np.int32)
    for i in range(size):
        counts[(patterns[i] & MAGNITUDE) >> FIRST] += 1
    high, larger = ranked(counts, n)
    for i in range(size):
        pattern = patterns[i] & MAGNITUDE
        counts[(pattern >> THEN) & 1023] += np.int32(pattern >> FIRST == high)
    middle, more = ranked(counts, n - larger)
    larger += more
    upper = (high << THEN) | middle
    for i in range(size):
        pattern = patterns[i] & MAGNITUDE
        counts[pattern & 1023] += np.int32(pattern >> THEN == upper)
    low, more = ranked(counts, n - larger)
    return (upper << THEN) | low, larger + more


def _guess(x: Any, residual: Any, numel: Any, step: Any, wanted: Any) -> Any:
    """What `wanted` entries of a sample reach, or a little less: runs of 16, `step` apart; up to 16: all."""
    given, before, counts = floats_at(x, 0, numel), floats_at(residual, 0, numel), np.zeros(2048, np.int32)
    size = np.int64(RUN) if step > RUN else numel
    part, larger = np.int64(0), np.int64(0)
    one = np.empty(1, np.float32)
    for turn in range(2):
        for start in range(0, numel - size + 1, step if step > RUN else numel):
            for i in range(start, start + size):
                one[0] = given[i] + before[i] if residual else given[i]
                pattern = one.view(np.int32)[0] & MAGNITUDE
                if turn == 0:
                    counts[pattern >> FIRST] += 1
                else:
                    counts[(pattern >> THEN) & 1023] += np.int32(pattern >> FIRST == part)
        if turn == 0:
            part, larger = ranked(counts, wanted)
    middle, _ = ranked(counts, wanted - larger)
    return number(np.int32(((part << THEN) | middle) << THEN))


# ---- the exact choice ---------------------------------------------------------------------------------


def _settle(index: Any, values: Any, least: Any, equal: int, new_residual: Any) -> Any:
    """Keep, moved to the front, what is larger than `least`, and of what is equal the first `equal`.

    What is not kept is given back to `owed`, where that is not empty. How many are kept.
    """
    kept: Any = 0
    left: Any = equal
    for j in range(index.shape[0]):
        place, value = index[j], values[j]
        tie = abs(value) == least
        keep = (abs(value) > least) | (tie & (left > 0))
        left -= np.int64(tie)
        index[kept] = place
        values[kept] = value
        kept += np.int64(keep)
        if new_residual.shape[0]:
            new_residual[place] = values.dtype.type(0) if keep else value
    return kept


def _choose(
    x: Any,
    residual: Any,
    new_residual: Any,
    numel: Any,
    k: Any,
    step: Any,
    wanted: Any,
    index: Any,
    values: Any,
    places: Any,
) -> Any:
    """Guess a threshold, sift, and keep the k largest. See `select.select_largest`; all by address.

    Returns:
        How many reached the threshold, if fewer than k; else k. -1 where there was no room. And whether only
        zeros did not reach it.
    """
    threshold = _GUESS(x, residual, numel, step, wanted) if wanted else np.float32(0)
    at_zero = not threshold >= LEAST and threshold == threshold
    found = _SIFT(x, residual, new_residual, numel, LEAST if at_zero else threshold, index, values, places)
    if found > k:
        bits, larger = _NTH(values, found, k)
        at, entries = ints_at(index, 0, found), floats_at(values, 0, found)
        back = floats_at(new_residual, 0, numel if new_residual else 0)
        found = _SETTLE(at, entries, number(np.int32(bits)), k - larger, back)
    return found, at_zero


# ---- chunk by chunk -----------------------------------------------------------------------------------


@inlined
def reaching(ranks: Any, least: Any) -> Any:
    """How many ranks are at least `least`."""
    count = np.int32(0)
    for i in range(ranks.shape[0]):
        count += np.int32(ranks[i] >= least)
    return count


@inlined
def least_of(ranks: Any, wanted: Any) -> Any:
    """A rank that `wanted` of them reach; where ties do not allow that, the largest that more do."""
    least, count = np.int32(0), np.int32(ranks.shape[0])
    for bit in range(30, -1, -1):
        if count == wanted:
            break
        more = np.int32(least | (1 << bit))
        reached = reaching(ranks, more)
        if reached >= wanted:
            least, count = more, reached
    return least


def _in_chunks(
    x: Any,
    residual: Any,
    new_residual: Any,
    numel: Any,
    k: Any,
    chunk: Any,
    index: Any,
    values: Any,
    places: Any,
) -> None:
    """See `select.select_in_chunks`; all by address. NaN has rank 0, and others one more than their bits."""
    at, entries, found = ints_at(index, 0, places), floats_at(values, 0, places), np.int64(0)
    whole = np.empty(chunk, np.int32)
    for start in range(0, numel, chunk):
        size = min(chunk, numel - start)
        a = floats_at(new_residual if residual else x, start, size)
        if residual:
            given, before = floats_at(x, start, size), floats_at(residual, start, size)
            for i in range(size):
                a[i] = given[i] + before[i]
        ranks, patterns = whole[:size], ints_at(new_residual if residual else x, start, size)
        for i in range(size):
            pattern = patterns[i] & MAGNITUDE
            ranks[i] = np.int32(pattern + 1) if pattern <= INFINITE else np.int32(0)
        wanted = min(k, size)
        least = least_of(ranks, wanted)
        left = wanted - reaching(ranks, np.int32(least + 1))
        for i in range(size):
            if ranks[i] < least:
                continue
            if ranks[i] == least:
                left -= 1
                if left < 0:
                    continue
            at[found] = np.int32(start + i)
            entries[found] = a[i]
            found += 1
            if residual:
                a[i] = 0


LEAST = np.float32(2.0**-149)
INFINITE = np.int32(0x7F800000)
_REALS = ("float32", "float64")
sift = _SIFT = compiled(_sift, ["int64(int64, int64, int64, int64, float32, int64, int64, int64)"])
sift_one_by_one = compiled(
    _sift_one_by_one, ["int64(float64[::1], float64[::1], float64[::1], float64, int32[::1], float64[::1])"]
)
settle = _SETTLE = compiled(_settle, [f"int64(int32[::1], {x}[::1], {x}, int64, {x}[::1])" for x in _REALS])
nth = _NTH = compiled(_nth, ["UniTuple(int64, 2)(int64, int64, int64)"])
_GUESS = compiled(_guess, ["float32(int64, int64, int64, int64, int64)"])
in_chunks = compiled(_in_chunks, [f"void({', '.join(['int64'] * 9)})"])
choose = compiled(_choose, [f"Tuple((int64, boolean))({', '.join(['int64'] * 10)})"])
