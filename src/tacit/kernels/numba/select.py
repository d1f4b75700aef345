"""`kernels.select` by numba: one pass adds the residual, finds what is large, and keeps the rest.

Of fp32 64 entries are compared together, and only those that are found one by one; fp64 entry by entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.dispatch import address, arrays
from tacit.kernels.entry_buffers import (
    MARGIN,
    RUN,
    EntryBuffer,
    Selection,
    first_of,
    new_buffer,
    sample_rank,
    sample_size,
    sample_step,
)
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.passes import load_and_fetch, load_sum, streams, write
from tacit.kernels.numba.pointers import floats_at, ints_at
from tacit.kernels.numba.primitives import MAGNITUDE
from tacit.kernels.numba.vectors import (
    LANES,
    VECTOR_BYTES,
    float_from_bits,
    float_vector,
    lowest_set_bit,
    magnitude,
    mask_bits,
    settle,
    where,
)
from tacit.kernels.reference import select as reference
from tacit.kernels.select import chunked
from tacit.kernels.thread_scratch import thread_scratch

PIECE = MARGIN
"""Entries between two checks whether the buffer is still large enough."""
HIGH, MIDDLE = 20, 10
"""Bits below the first and the second part of a magnitude's bits, which are counted part by part."""


@inline
def collect_vector(
    x: Any, residual: Any, new_residual: Any, i: Any, threshold: Any, found: Any, positions: Any, values: Any,
    past_caches: Any,
) -> Any:  # fmt: skip
    """Append entries that reach the threshold, or are NaN, of the 64 from 64 i on; returns the new count."""
    at = i * VECTOR_BYTES
    a = load_and_fetch(x, residual, at) if past_caches else load_sum(x, residual, at)
    below = magnitude(a) < float_vector(threshold)
    hits = ~mask_bits(below)
    given, before = floats_at(x, i * LANES, LANES), floats_at(residual, i * LANES, LANES)
    while hits:
        j = lowest_set_bit(hits)
        positions[found] = np.int32(i * LANES + j)
        values[found] = given[j] + before[j] if residual else given[j]
        found += 1
        hits &= hits - 1
    if residual:
        write(new_residual + at, where(below, a, float_vector(np.float32(0))), past_caches)
    return found


@inline
def drop_nan(found: Any, positions: Any, values: Any, new_residual: Any) -> Any:
    """Put back NaN among the found entries; returns how many are left, and whether all were finite."""
    at, entries, bits = ints_at(positions, 0, found), floats_at(values, 0, found), ints_at(values, 0, found)
    largest = np.int32(0)
    for j in range(found):
        largest = max(largest, bits[j] & MAGNITUDE)
    if largest <= INFINITY:
        return np.int64(found), largest < INFINITY
    kept = np.int64(0)
    for j in range(found):
        if bits[j] & MAGNITUDE <= INFINITY:
            at[kept], entries[kept] = at[j], entries[j]
            kept += 1
        elif new_residual:
            floats_at(new_residual, at[j], 1)[0] = entries[j]
    return kept, False


def _select_reaching(
    x: Any, residual: Any, new_residual: Any, numel: Any, threshold: Any, positions: Any, values: Any,
    capacity: Any,
) -> Any:  # fmt: skip
    """`select.select_reaching` by address; `residual` is 0 where there is none.

    Returns: The number of found entries, or -1 if the buffer is too small; `new_residual` is then unfinished.
        And whether all entries were finite.
    """
    at, entries, found = ints_at(positions, 0, capacity), floats_at(values, 0, capacity), np.int64(0)
    whole, step, past_caches = numel // LANES, PIECE // LANES, streams(new_residual, numel)
    for piece in range(0, whole, step):
        if found + PIECE > capacity:
            return np.int64(-1), False
        for i in range(piece, min(piece + step, whole)):
            found = collect_vector(x, residual, new_residual, i, threshold, found, at, entries, past_caches)
    settle()
    if found + LANES > capacity:
        return np.int64(-1), False
    given, rest = floats_at(x, 0, numel), floats_at(new_residual, 0, numel)
    before = floats_at(residual, 0, numel)
    for i in range(whole * LANES, numel):
        a = given[i] + before[i] if residual else given[i]
        reached = not abs(a) < threshold
        if residual:
            rest[i] = np.float32(0) if reached else a
        at[found] = i
        entries[found] = a
        found += np.int64(reached)
    return drop_nan(found, positions, values, new_residual)


def _select_reaching_fp64(
    x: Any, residual: Any, new_residual: Any, threshold: Any, positions: Any, values: Any
) -> Any:
    """`_select_reaching` of fp64, an entry at a time; `residual` and `new_residual` may be empty."""
    found = np.int64(0)
    for piece in range(0, x.shape[0], PIECE):
        if found + PIECE > positions.shape[0]:
            return -1
        for i in range(piece, min(piece + PIECE, x.shape[0])):
            a = x[i] + residual[i] if residual.shape[0] else x[i]
            reached = abs(a) >= threshold
            if residual.shape[0]:
                new_residual[i] = np.float64(0) if reached else a
            positions[found] = i
            values[found] = a
            found += np.int64(reached)
    return found


# ---- the n-th largest ---------------------------------------------------------------------------------


@inline
def find_rank(counts: Any, n: Any) -> Any:
    """The bin in which the n-th largest lies, and how many are in larger ones. `counts` is cleared."""
    larger, part = np.int64(0), np.int64(counts.shape[0] - 1)
    while part > 0 and larger + counts[part] < n:
        larger += counts[part]
        part -= 1
    counts[:] = 0
    return part, larger


def _nth_largest(bits: Any, size: Any, n: Any) -> Any:
    """The bits of the n-th largest magnitude, and how many are larger. A NaN is larger than all."""
    patterns, counts = ints_at(bits, 0, size), np.zeros(2048, np.int32)
    for i in range(size):
        counts[(patterns[i] & MAGNITUDE) >> HIGH] += 1
    high, larger = find_rank(counts, n)
    for i in range(size):
        pattern = patterns[i] & MAGNITUDE
        counts[(pattern >> MIDDLE) & 1023] += np.int32(pattern >> HIGH == high)
    middle, more = find_rank(counts, n - larger)
    larger += more
    upper = (high << MIDDLE) | middle
    for i in range(size):
        pattern = patterns[i] & MAGNITUDE
        counts[pattern & 1023] += np.int32(pattern >> MIDDLE == upper)
    low, more = find_rank(counts, n - larger)
    return (upper << MIDDLE) | low, larger + more


def _guess_threshold(x: Any, residual: Any, numel: Any, step: Any, wanted: Any, sample: Any) -> Any:
    """What `wanted` entries of a sample reach; see `reference.select.sample`. NaN counts as the largest.

    The sample is written to `sample`.
    """
    given, before = floats_at(x, 0, numel), floats_at(residual, 0, numel if residual else 0)
    size, stride = (np.int64(RUN), step) if step > RUN else (numel, numel)
    runs = (numel - size) // stride + 1
    entries = floats_at(sample, 0, runs * size)
    for run in range(runs):
        start = run * stride
        part, piece = entries[run * size : (run + 1) * size], given[start : start + size]
        if residual:
            others = before[start : start + size]
            for i in range(size):
                part[i] = piece[i] + others[i]
        else:
            part[:] = piece
    bits, _ = _NTH_LARGEST(sample, runs * size, wanted)
    return float_from_bits(np.int32(bits))


# ---- the exact choice ---------------------------------------------------------------------------------


def _keep_above(positions: Any, values: Any, least: Any, equal: int, new_residual: Any) -> Any:
    """Move to the front what is larger than `least`, and the first `equal` that equal it; returns the count.

    The others are put back into `new_residual`, if that is not empty.
    """
    kept: Any = 0
    left: Any = equal
    for j in range(positions.shape[0]):
        place, value = positions[j], values[j]
        tie = abs(value) == least
        keep = (abs(value) > least) | (tie & (left > 0))
        left -= np.int64(tie)
        positions[kept] = place
        values[kept] = value
        kept += np.int64(keep)
        if new_residual.shape[0] and not keep:
            new_residual[place] = value
    return kept


def _select_largest(
    x: Any, residual: Any, new_residual: Any, numel: Any, k: Any, step: Any, wanted: Any, positions: Any,
    values: Any, capacity: Any, sample: Any,
) -> Any:  # fmt: skip
    """Guess a threshold, collect what reaches it, and keep the k largest; all by address.

    `sample` has room for it, where `wanted` is above 0.

    Returns:
        How many reached the threshold, if fewer than k; else k. -1 where the buffer is too small. Whether
        all but zeros reached it. Whether all entries were seen to be finite.
    """
    threshold = _GUESS_THRESHOLD(x, residual, numel, step, wanted, sample) if wanted else np.float32(0)
    at_zero = not threshold >= LEAST and threshold == threshold
    found, finite = _SELECT_REACHING(
        x, residual, new_residual, numel, LEAST if at_zero else threshold, positions, values, capacity
    )
    if found > k:
        bits, larger = _NTH_LARGEST(values, found, k)
        at, entries = ints_at(positions, 0, found), floats_at(values, 0, found)
        back = floats_at(new_residual, 0, numel if new_residual else 0)
        found = _KEEP_ABOVE(at, entries, float_from_bits(np.int32(bits)), k - larger, back)
    return found, at_zero, finite


# ---- chunk by chunk -----------------------------------------------------------------------------------


@inline
def count_reaching(ranks: Any, least: Any) -> Any:
    """How many ranks are at least `least`."""
    count = np.int32(0)
    for i in range(ranks.shape[0]):
        count += np.int32(ranks[i] >= least)
    return count


@inline
def kth_largest(ranks: Any, wanted: Any) -> Any:
    """A rank that `wanted` of them reach; where ties do not allow that, the largest that more do."""
    least, count = np.int32(0), np.int32(ranks.shape[0])
    for bit in range(30, -1, -1):
        if count == wanted:
            break
        more = np.int32(least | (1 << bit))
        reached = count_reaching(ranks, more)
        if reached >= wanted:
            least, count = more, reached
    return least


def _select_in_chunks(
    x: Any, residual: Any, new_residual: Any, numel: Any, k: Any, chunk: Any, positions: Any, values: Any,
    capacity: Any,
) -> None:  # fmt: skip
    """`select.select_in_chunks` by address. NaN has rank 0, and others one more than their bits."""
    at, entries, found = ints_at(positions, 0, capacity), floats_at(values, 0, capacity), np.int64(0)
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
            ranks[i] = np.int32(pattern + 1) if pattern <= INFINITY else np.int32(0)
        wanted = min(k, size)
        least = kth_largest(ranks, wanted)
        left = wanted - count_reaching(ranks, np.int32(least + 1))
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
INFINITY = np.int32(0x7F800000)
_REALS = ("float32", "float64")
_SELECT_REACHING = compile_now(
    _select_reaching, ["Tuple((int64, boolean))(int64, int64, int64, int64, float32, int64, int64, int64)"]
)
_SELECT_REACHING_FP64 = compile_now(
    _select_reaching_fp64,
    ["int64(float64[::1], float64[::1], float64[::1], float64, int32[::1], float64[::1])"],
)
keep_above = _KEEP_ABOVE = compile_now(
    _keep_above, [f"int64(int32[::1], {x}[::1], {x}, int64, {x}[::1])" for x in _REALS]
)
nth_largest = _NTH_LARGEST = compile_now(_nth_largest, ["UniTuple(int64, 2)(int64, int64, int64)"])
_GUESS_THRESHOLD = compile_now(_guess_threshold, ["float32(int64, int64, int64, int64, int64, int64)"])
_SELECT_IN_CHUNKS = compile_now(_select_in_chunks, [f"void({', '.join(['int64'] * 9)})"])
_SELECT_LARGEST = compile_now(
    _select_largest, [f"Tuple((int64, boolean, boolean))({', '.join(['int64'] * 11)})"]
)


# ---- called from Python -------------------------------------------------------------------------------


def select_largest(
    x: Tensor, k: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None, look: Callable[[], None] | None = None,
) -> Selection:  # fmt: skip
    """See `kernels.select`; by thresholds that are guessed, with more effort, and then without any."""
    positions, values = buffer = buffer or new_buffer(x, k)
    before, after = (
        (0, 0) if residual is None or new_residual is None else map(address, (residual, new_residual))
    )
    numel, finite = x.numel(), False
    found: Selection | None = None
    for effort in (1, 16) if k else ():
        sample = sample_size(numel, effort)
        rank = sample_rank(numel, k, sample)
        rank = 0 if rank == sample < numel else rank  # all of the sample: then all but zeros
        count, all_but_zeros, finite = _SELECT_LARGEST(
            x.data_ptr(), before, after, numel, k, sample_step(numel, effort), rank, positions.data_ptr(),
            values.data_ptr(), positions.numel(),
            # Where positions are written when the sample has served, and unpacked to: 32 bits each, too.
            thread_scratch("index", sample if rank else 0, torch.int32, x.device).data_ptr(),
        )  # fmt: skip
        found = Selection(positions[:count], values[:count]) if count >= 0 else None
        if found is not None and all_but_zeros and count < k:
            found = reference.fill_with_zeros(found, k, x, residual, new_residual)
        if (found is not None and found.positions.numel() == k) or sample == numel:
            break
    if found is None or found.positions.numel() < k:
        if k:
            reference.select_by_kthvalue(x, k, buffer, residual, new_residual)
        found, finite = first_of(buffer, k), False
    if look is not None and not finite:
        look()
    return found


def select_in_chunks(
    x: Tensor, per_chunk: int, chunk: int, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """See `kernels.select`."""
    given = x.data_ptr(), address(residual), address(new_residual), x.numel()
    _SELECT_IN_CHUNKS(*given, per_chunk, chunk, *_addresses(buffer))
    return first_of(buffer, chunked(x.numel(), per_chunk, chunk))


def select_reaching(
    x: Tensor, threshold: float, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection | None:  # fmt: skip
    """See `kernels.select`."""
    if math.isnan(threshold):
        return reference.select_reaching(x, threshold, buffer, residual, new_residual)
    if x.dtype == torch.float32:
        given = x.data_ptr(), address(residual), address(new_residual), x.numel()
        count, _ = _SELECT_REACHING(*given, threshold, *_addresses(buffer))
    else:
        both = (x[:0] if each is None else each for each in (residual, new_residual))
        array, before, after, positions, values = arrays(x, *both, *buffer)
        count = _SELECT_REACHING_FP64(array, before, after, threshold, positions, values)
    return None if count < 0 else first_of(buffer, count)


def keep_largest(found: Selection, k: int, new_residual: Tensor | None) -> Selection:
    """See `kernels.select`."""
    if found.positions.numel() > k:
        least, larger = reference.nth_largest(found.values, k)
        positions, values, rest = arrays(*found, found.values[:0] if new_residual is None else new_residual)
        keep_above(positions, values, values.dtype.type(least), k - larger, rest)
    return first_of(found, k)


def _addresses(buffer: EntryBuffer) -> tuple[int, int, int]:
    return buffer.positions.data_ptr(), buffer.values.data_ptr(), buffer.positions.numel()
