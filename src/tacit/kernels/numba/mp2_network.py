"""`kernels.mp2_network` by numba: of 16 elements at a time, nothing leaves the first cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.pointers import floats_at, ints_at, shorts_at
from tacit.kernels.numba.vectors import (
    extend_sixteen,
    load_sixteen,
    load_sixteen_shorts,
    magnitude,
    sixteen,
    sixteen_ints,
    sixteen_of_bits,
    sixteen_to_float,
    sixteen_to_int,
    store,
    where,
)
from tacit.kernels.reference.mp2_network import EXPONENTIAL, INPUTS, LN2_HIGH, LN2_LOW, LOG2_E, TAPS

LANES, ROW = 16, 64
"""Elements at a time, and bytes of one number of each: a row."""
WIDEST = 8
"""Channels that there are rows for."""
HIDDEN_AT, MEAN_AT, MOST_AT, GATE_AT, PART_AT, SPARE_AT = (
    (INPUTS + k * WIDEST) * ROW for k in (0, 2, 3, 4, 5, 6)
)
"""Where rows begin: of the first layer; of the second's mean, maximum and gate; of parts of a sum; spare."""
ROWS = INPUTS + 6 * WIDEST + 5
ZERO, HALF, ONE = (np.float32(each) for each in (0, 0.5, 1))
LOG2E, HIGH, LOW, FARTHEST = (np.float32(each) for each in (LOG2_E, LN2_HIGH, LN2_LOW, 80))
E0, E1, E2, E3, E4, E5 = (np.float32(each) for each in EXPONENTIAL)
TO_NEAREST = np.float32(1.5 * 2**23)
"""Added and subtracted, it leaves the nearest integer."""
BIAS, MANTISSA = np.int32(127), np.int32(23)


@inline
def relu(x: Any) -> Any:
    """Its positive part."""
    return where(x < sixteen(ZERO), sixteen(ZERO), x)


@inline
def within(x: Any, limit: Any) -> Any:
    """`x`, at most `limit` from 0."""
    low, high = sixteen(-limit), sixteen(limit)
    return where(x < low, low, where(high < x, high, x))


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    x = within(x * sixteen(-ONE), FARTHEST)
    whole = (x * sixteen(LOG2E) + sixteen(TO_NEAREST)) - sixteen(TO_NEAREST)
    rest = x - whole * sixteen(HIGH) - whole * sixteen(LOW)
    series = sixteen(E0) * rest + sixteen(E1)
    series = series * rest + sixteen(E2)
    series = series * rest + sixteen(E3)
    series = series * rest + sixteen(E4)
    series = series * rest + sixteen(E5)
    power = sixteen_of_bits((sixteen_to_int(whole) + sixteen_ints(BIAS)) << sixteen_ints(MANTISSA))
    return sixteen(ONE) / (sixteen(ONE) + (series * rest * rest + rest + sixteen(ONE)) * power)


@inline
def sum_of_parts(rows: Any, width: Any) -> Any:
    """The sum of `width` rows from PART_AT on, in halves of a power of two; they are overwritten."""
    parts, side = rows + PART_AT, 1
    while side < width:
        side *= 2
    for c in range(width, side):
        store(parts + c * ROW, sixteen(ZERO))
    while side > 1:
        side //= 2
        for c in range(side):
            both = load_sixteen(parts + c * ROW) + load_sixteen(parts + (c + side) * ROW)
            store(parts + c * ROW, both)
    return load_sixteen(parts)


@inline
def first_layer(rows: Any, weights: Any, width: Any) -> None:
    """Of the inputs, in the first rows."""
    for k in range(TAPS * width):
        x = sixteen(weights[TAPS * width * INPUTS + k // TAPS])
        for i in range(INPUTS):
            x = x + sixteen(weights[k * INPUTS + i]) * load_sixteen(rows + i * ROW)
        store(rows + HIDDEN_AT + k * ROW, relu(x))


@inline
def second_layer(rows: Any, weights: Any, width: Any) -> None:
    """Of the first: of each channel the mean and the maximum of both changes."""
    both = TAPS * width
    second = both * INPUTS + width
    bias = second + both * both
    for c in range(width):
        older = newer = sixteen(weights[bias + c])
        row = second + c * TAPS * both
        for k in range(both):
            x = load_sixteen(rows + HIDDEN_AT + k * ROW)
            older = older + sixteen(weights[row + k]) * x
            newer = newer + sixteen(weights[row + both + k]) * x
        older, newer = relu(older), relu(newer)
        store(rows + MEAN_AT + c * ROW, (older + newer) * sixteen(HALF))
        store(rows + MOST_AT + c * ROW, where(older < newer, newer, older))


@inline
def attention(rows: Any, weights: Any, width: Any) -> None:
    """Squeeze and excite: the input of the sigmoid for each channel."""
    both, narrow = TAPS * width, max(1, width // 4)
    squeeze = both * INPUTS + width + both * both + width
    excite = squeeze + narrow * width + narrow
    for c in range(width):
        store(rows + GATE_AT + c * ROW, sixteen(weights[excite + width * narrow + c]))
    for j in range(narrow):
        for c in range(width):
            part = sixteen(weights[squeeze + j * width + c]) * load_sixteen(rows + MEAN_AT + c * ROW)
            store(rows + PART_AT + c * ROW, part)
        x = relu(sum_of_parts(rows, width) + sixteen(weights[squeeze + narrow * width + j]))
        for c in range(width):
            at = rows + GATE_AT + c * ROW
            store(at, load_sixteen(at) + sixteen(weights[excite + c * narrow + j]) * x)


@inline
def network(rows: Any, weights: Any, width: Any, limit: Any) -> Any:
    """delta of 16 elements."""
    first_layer(rows, weights, width)
    second_layer(rows, weights, width)
    attention(rows, weights, width)
    last = weights.shape[0] - width - 1
    for c in range(width):
        y = load_sixteen(rows + MOST_AT + c * ROW) * sigmoid(load_sixteen(rows + GATE_AT + c * ROW))
        store(rows + PART_AT + c * ROW, sixteen(weights[last + c]) * y)
    return within(sum_of_parts(rows, width) + sixteen(weights[last + width]), limit)


@inline
def predicted(older: Any, newer: Any, rows: Any, weights: Any, width: Any, limit: Any) -> Any:
    """The next change of 16 elements, whose ages and sizes are in the rows."""
    size = magnitude(older) * sixteen(HALF) + magnitude(newer) * sixteen(HALF)
    unit = where(sixteen(ZERO) < size, size, sixteen(ONE))
    store(rows, older / unit)
    store(rows + ROW, newer / unit)
    return network(rows, weights, width, limit) * size


# ---- of changes that are side by side ------------------------------------------------------------------


@inline
def stage(source: Any, step: Any, start: Any, count: Any, row: Any) -> None:
    """Numbers of `count` elements from `start` on, which lie `step` apart, as a row; 1 after them."""
    here, there = floats_at(source, 0, start + count), floats_at(row, 0, LANES)
    for i in range(LANES):
        there[i] = here[(start + i) * step] if i < count else ONE


@inline
def apart(step: Any, numel: Any) -> Any:
    """The distance from the number of the older change to that of the newer one."""
    return numel if step else 1


def _predict(
    changes: Any,
    ages: Any,
    ages_step: Any,
    swings: Any,
    swings_step: Any,
    numel: Any,
    packed: Any,
    size: Any,
    width: Any,
    limit: Any,
    out: Any,
) -> None:
    scratch = np.empty(ROWS * LANES, np.float32)
    rows, weights = scratch.ctypes.data, floats_at(packed, 0, size)
    spare, limit = rows + SPARE_AT, np.float32(limit)
    target, result = floats_at(out, 0, numel), floats_at(spare, 0, LANES)
    for start in range(0, numel, LANES):
        count = min(LANES, numel - start)
        for tap in range(TAPS):
            stage(changes + tap * 4 * numel, 1, start, count, spare + tap * ROW)
            stage(ages + tap * 4 * apart(ages_step, numel), ages_step, start, count, rows + (2 + tap) * ROW)
            age = load_sixteen(rows + (2 + tap) * ROW)
            store(rows + (2 + tap) * ROW, sixteen(ONE) / age)
            sizes = swings + tap * 4 * apart(swings_step, numel)
            stage(sizes, swings_step, start, count, rows + (4 + tap) * ROW)
        older, newer = load_sixteen(spare), load_sixteen(spare + ROW)
        store(spare, predicted(older, newer, rows, weights, width, limit))
        for i in range(count):
            target[start + i] = result[i]


_PREDICT = compile_now(_predict, [f"void({', '.join(['int64'] * 9)}, float64, int64)"])
"""Of fp32; `ages_step` and `swings_step` are 1, or 0 where all share one."""


def predict_changes(
    changes: Tensor, ages: Tensor, log_swings: Tensor, packed: Tensor, width: int, limit: float, out: Tensor
) -> None:
    """See `kernels.mp2_network`; of other types than fp32 by a copy."""
    changes, ages, log_swings = (each.float().contiguous() for each in (changes, ages, log_swings))
    found = out if out.dtype == torch.float32 else torch.empty_like(changes[0])
    varies = [int(each.shape[1] > 1) for each in (ages, log_swings)]
    given = changes.data_ptr(), ages.data_ptr(), varies[0], log_swings.data_ptr(), varies[1], out.numel()
    _PREDICT(*given, packed.data_ptr(), len(packed), width, limit, found.data_ptr())
    if found is not out:
        out.copy_(found)


# ---- of changes that were received now and then ---------------------------------------------------------


@inline
def read_history(age: Any, gap: Any, table: Any, rounds: Any, rows: Any) -> Any:
    """Write ages and sizes of 16 elements to the rows; 1 where both changes are known, else 0."""
    newer, between = extend_sixteen(load_sixteen_shorts(age)), extend_sixteen(load_sixteen_shorts(gap))
    older, least = newer + between, sixteen_ints(np.int32(1))
    least_known = where(newer < between, newer, between)
    older, newer = where(older < least, least, older), where(newer < least, least, newer)
    store(rows + 2 * ROW, sixteen(ONE) / sixteen_to_float(older))
    store(rows + 3 * ROW, sixteen(ONE) / sixteen_to_float(newer))
    most = sixteen_ints(rounds)
    store(rows + SPARE_AT, where(older < most, older, most))
    store(rows + SPARE_AT + ROW, where(newer < most, newer, most))
    which, sizes = ints_at(rows + SPARE_AT, 0, TAPS * LANES), floats_at(rows + 4 * ROW, 0, TAPS * LANES)
    for i in range(TAPS * LANES):
        sizes[i] = table[which[i]]
    return where(least_known < least, sixteen(ZERO), sixteen(ONE))


def _predict_received(
    before: Any,
    last: Any,
    age: Any,
    gap: Any,
    numel: Any,
    log_swings: Any,
    rounds: Any,
    packed: Any,
    size: Any,
    width: Any,
    limit: Any,
    scale: Any,
    out: Any,
) -> None:
    scratch = np.zeros(ROWS * LANES, np.float32)
    rows, weights = scratch.ctypes.data, floats_at(packed, 0, size)
    table, limit, factor = floats_at(log_swings, 0, rounds + 1), np.float32(limit), sixteen(np.float32(scale))
    whole, most = numel // LANES * LANES, np.int32(rounds)
    for start in range(0, whole, LANES):
        known = read_history(age + 2 * start, gap + 2 * start, table, most, rows)
        older, newer = load_sixteen(before + 4 * start) * known, load_sixteen(last + 4 * start) * known
        store(out + 4 * start, predicted(older, newer, rows, weights, width, limit) * factor)
    if whole < numel:
        padded = scratch[SPARE_AT // 4 + 2 * LANES :]
        spare, rest = padded.ctypes.data, numel - whole
        counts, given = shorts_at(spare, 0, 2 * LANES), floats_at(spare + ROW, 0, 2 * LANES)
        ages, gaps = shorts_at(age, 0, numel), shorts_at(gap, 0, numel)
        older_one, newer_one = floats_at(before, 0, numel), floats_at(last, 0, numel)
        for i in range(rest):
            counts[i], counts[LANES + i] = ages[whole + i], gaps[whole + i]
            given[i], given[LANES + i] = older_one[whole + i], newer_one[whole + i]
        known = read_history(spare, spare + ROW // 2, table, most, rows)
        older, newer = load_sixteen(spare + ROW) * known, load_sixteen(spare + 2 * ROW) * known
        store(spare, predicted(older, newer, rows, weights, width, limit) * factor)
        result, target = floats_at(spare, 0, LANES), floats_at(out, 0, numel)
        for i in range(rest):
            target[whole + i] = result[i]


_PREDICT_RECEIVED = compile_now(
    _predict_received,
    [f"void({', '.join(['int64'] * 10)}, float64, float64, int64)"],
)


def predict_received(
    before: Tensor, last: Tensor, age: Tensor, gap: Tensor, log_swings: Tensor, packed: Tensor, width: int,
    limit: float, scale: float, out: Tensor,
) -> bool:  # fmt: skip
    """See `kernels.mp2_network`."""
    given = before.data_ptr(), last.data_ptr(), age.data_ptr(), gap.data_ptr(), out.numel()
    table, weights = (log_swings.data_ptr(), len(log_swings) - 1), (packed.data_ptr(), len(packed))
    _PREDICT_RECEIVED(*given, *table, *weights, width, limit, scale, out.data_ptr())
    return True
