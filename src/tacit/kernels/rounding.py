"""The compiled half of `int8`: round, and keep what is owed, in one pass; add any number of peers in one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled, inlined
from tacit.kernels.parts import HUGE, MAGNITUDE, inverted
from tacit.kernels.pointers import bytes_at, float32_at, floats_at
from tacit.kernels.vectors import (
    LANES,
    SIZE,
    as_floats,
    floats,
    ints,
    largest,
    load_bytes,
    load_floats,
    low_bytes,
    number,
    pattern,
    pick,
    signed,
    store,
)

BLOCK, VECTORS = 512, 8
TOP = np.float32(127)
MAGIC = np.float32(12582912.0)
"""Added and taken away again, it rounds to the nearest whole number, to the even one of two; and with it
added, the lowest byte of the number's bits is that of the whole number."""


@inlined
def encoded(x: Any, residual: Any, new_residual: Any, at: Any, codes: Any, units: Any, b: Any) -> None:
    """The block `b` at the addresses."""
    most = ints(np.int32(0))
    for i in range(VECTORS):
        a = load_floats(x + at + i * SIZE)
        if residual:
            a = a + load_floats(residual + at + i * SIZE)
            store(new_residual + at + i * SIZE, a)
        bits = pattern(a) & ints(MAGNITUDE)
        most = pick(bits >= most, bits, most)
    unit = min(number(largest(most)), HUGE) / TOP
    inverse = inverted(unit)
    unit = unit if inverse > 0 else np.float32(0)
    floats_at(units, b, 1)[0] = unit
    source = new_residual if residual else x
    for i in range(VECTORS):
        a = load_floats(source + at + i * SIZE)
        shifted = a * floats(inverse) + floats(MAGIC)
        store(codes + i * LANES, low_bytes(pattern(shifted)))
        if residual:
            store(new_residual + at + i * SIZE, a - floats(unit) * (shifted - floats(MAGIC)))


def _encode(x: Any, residual: Any, new_residual: Any, numel: Any, codes: Any, units: Any) -> None:
    """See `int8`: addresses; 0 for no `residual`, and none owed then."""
    whole = numel // BLOCK
    for b in range(whole):
        encoded(x, residual, new_residual, b * BLOCK * 4, codes + b * BLOCK, units, b)
    rest = numel - whole * BLOCK
    if rest:
        begin = whole * BLOCK
        room, levels = np.zeros((3, BLOCK), np.float32), np.empty(BLOCK, np.uint8)
        room[0, :rest] = floats_at(x, begin, rest)
        if residual:
            room[1, :rest] = floats_at(residual, begin, rest)
        at = room.ctypes.data
        before = at + 4 * BLOCK if residual else np.uint64(0)
        encoded(at, before, at + 8 * BLOCK, 0, levels.ctypes.data, units, whole)
        if residual:
            floats_at(new_residual, begin, rest)[:] = room[2, :rest]
        bytes_at(codes, begin, rest)[:] = levels[:rest]


def _add(codes: Any, units: Any, weight: Any, fresh: Any, out: Any, numel: Any) -> None:
    """Add `weight` times what each peer says, in their order."""
    unit = np.empty(codes.shape[0], np.float32)
    whole = numel // BLOCK
    for b in range(whole + (numel > whole * BLOCK)):
        for peer in range(codes.shape[0]):
            unit[peer] = float32_at(units[peer], b) * weight
        if b < whole:
            for start in range(b * BLOCK, (b + 1) * BLOCK, LANES):
                total = floats(np.float32(0)) if fresh else load_floats(out + 4 * start)
                for peer in range(codes.shape[0]):
                    level = as_floats(signed(load_bytes(codes[peer] + start)))
                    total = total + floats(unit[peer]) * level
                store(out + 4 * start, total)
            continue
        target = floats_at(out, b * BLOCK, numel - b * BLOCK)
        if fresh:
            target[:] = 0
        for peer in range(codes.shape[0]):
            code = bytes_at(codes[peer], b * BLOCK, target.shape[0])
            for i in range(target.shape[0]):
                target[i] += unit[peer] * np.float32(np.int8(code[i]))


encode = compiled(_encode, [f"void({', '.join(['int64'] * 6)})"])
add = compiled(_add, ["void(int64[::1], int64[::1], float32, boolean, int64, int64)"])
