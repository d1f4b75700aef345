"""`kernels.products` by numba: each product reads the matrices once, and adds or subtracts in the same pass.

Four columns of the factors are taken together; a rank that is no multiple of four is filled up with columns
of zeros. All sums are in one order, whatever the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import address
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.pointers import floats_at
from tacit.kernels.numba.vectors import load_sixteen, prefetch, settle, sixteen, store, stream, sum_by_halves
from tacit.kernels.products import Place

LANES, BYTES = 16, 64
"""Entries of a vector, and their bytes."""
TOGETHER = 4
"""Columns of the factors."""
BLOCK = 1024
"""Columns of a matrix that are gone through at once: so much of four columns of Q stays in a core's cache."""
ZEROS = np.zeros(BLOCK, np.float32)
"""The zeros that are read in place of columns beyond the rank."""
ZEROS_AT: int = ZEROS.ctypes.data
"""Their address, which is passed to kernels as `zeros`."""


@inline
def four(factors: Any, at: Any, size: Any, left: Any, k: Any, rank: Any, zeros: Any) -> Any:
    """Where entry `left` of each of four columns lies, the first of them `k`."""
    here = factors + 4 * (at + left)
    return (
        here + 4 * k * size if k < rank else zeros,
        here + 4 * (k + 1) * size if k + 1 < rank else zeros,
        here + 4 * (k + 2) * size if k + 2 < rank else zeros,
        here + 4 * (k + 3) * size if k + 3 < rank else zeros,
    )


def _times_q(x: Any, residual: Any, total: Any, places: Any, rank: Any, p: Any, q: Any, zeros: Any) -> None:
    """P = (x + residual) Q, by address; `total` becomes x + residual. `residual` is 0 where there is none."""
    at_p, at_q = np.int64(0), np.int64(0)
    for n in range(places.shape[0]):
        start, rows, columns = places[n, 0], places[n, 1], places[n, 2]
        further = 8 * columns  # the next two rows, which the processor does not fetch by itself
        floats_at(p, at_p, rank * rows)[:] = np.float32(0)
        for left in range(0, columns, BLOCK):
            width = min(BLOCK, columns - left)
            whole = width // LANES
            for k in range(0, rank, TOGETHER):
                # What was added up with the first columns is read with the others.
                source = total if residual and k else x
                before = residual if k == 0 else np.int64(0)
                q0, q1, q2, q3 = four(q, at_q, columns, left, k, rank, zeros)
                for i in range(0, rows, 2):
                    here = 4 * (start + i * columns + left)
                    below = here + 4 * columns * np.int64(i + 1 < rows)  # of an odd number the last again
                    streams = ((total + here) | (total + below)) & (BYTES - 1) == 0
                    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = sixteen(np.float32(0))
                    for c in range(whole):
                        by = c * BYTES
                        a, b = load_sixteen(source + here + by), load_sixteen(source + below + by)
                        if k == 0:
                            prefetch(x + here + by + further)
                            prefetch(x + below + by + further)
                        if before:
                            prefetch(before + here + by + further)
                            prefetch(before + below + by + further)
                            a = a + load_sixteen(before + here + by)
                            b = b + load_sixteen(before + below + by)
                            if streams:
                                stream(total + here + by, a)
                                stream(total + below + by, b)
                            else:
                                store(total + here + by, a)
                                store(total + below + by, b)
                        f0, f1 = load_sixteen(q0 + by), load_sixteen(q1 + by)
                        f2, f3 = load_sixteen(q2 + by), load_sixteen(q3 + by)
                        a0, a1, a2, a3 = a0 + a * f0, a1 + a * f1, a2 + a * f2, a3 + a * f3
                        b0, b1, b2, b3 = b0 + b * f0, b1 + b * f1, b2 + b * f2, b3 + b * f3
                    first = (sum_by_halves(a0), sum_by_halves(a1), sum_by_halves(a2), sum_by_halves(a3))
                    second = (sum_by_halves(b0), sum_by_halves(b1), sum_by_halves(b2), sum_by_halves(b3))
                    for row in range(min(2, rows - i)):
                        begin = below if row else here
                        sums = second if row else first
                        for j in range(min(TOGETHER, rank - k)):
                            factor = floats_at(q, at_q + (k + j) * columns + left, width)
                            value = sums[j]
                            for c in range(whole * LANES, width):
                                entry = floats_at(source + begin, c, 1)[0]
                                if before:
                                    entry = entry + floats_at(before + begin, c, 1)[0]
                                    floats_at(total + begin, c, 1)[0] = entry
                                value += entry * factor[c]
                            floats_at(p, at_p + (k + j) * rows + i + row, 1)[0] += value
            settle()
        at_p += rank * rows
        at_q += rank * columns


def _times_p(x: Any, places: Any, rank: Any, p: Any, q: Any, zeros: Any) -> None:
    """Q = x' P, by address."""
    at_p, at_q = np.int64(0), np.int64(0)
    weights = np.empty((2, TOGETHER), np.float32)
    for n in range(places.shape[0]):
        start, rows, columns = places[n, 0], places[n, 1], places[n, 2]
        further = 8 * columns
        floats_at(q, at_q, rank * columns)[:] = np.float32(0)
        for left in range(0, columns, BLOCK):
            width = min(BLOCK, columns - left)
            whole = width // LANES
            for k in range(0, rank, TOGETHER):
                used = min(TOGETHER, rank - k)
                q0, q1, q2, q3 = four(q, at_q, columns, left, k, rank, zeros)
                for i in range(0, rows, 2):
                    two = i + 1 < rows
                    here = x + 4 * (start + i * columns + left)
                    below = here + 4 * columns * np.int64(two)
                    weights[:] = np.float32(0)
                    for j in range(used):
                        factor = floats_at(p, at_p + (k + j) * rows, rows)
                        weights[0, j] = factor[i]
                        weights[1, j] = factor[i + 1] if two else np.float32(0)
                    u0, u1 = sixteen(weights[0, 0]), sixteen(weights[0, 1])
                    u2, u3 = sixteen(weights[0, 2]), sixteen(weights[0, 3])
                    v0, v1 = sixteen(weights[1, 0]), sixteen(weights[1, 1])
                    v2, v3 = sixteen(weights[1, 2]), sixteen(weights[1, 3])
                    for c in range(whole):
                        by = c * BYTES
                        a, b = load_sixteen(here + by), load_sixteen(below + by)
                        prefetch(here + by + further)
                        prefetch(below + by + further)
                        store(q0 + by, load_sixteen(q0 + by) + (a * u0 + b * v0))
                        if used > 1:
                            store(q1 + by, load_sixteen(q1 + by) + (a * u1 + b * v1))
                        if used > 2:
                            store(q2 + by, load_sixteen(q2 + by) + (a * u2 + b * v2))
                        if used > 3:
                            store(q3 + by, load_sixteen(q3 + by) + (a * u3 + b * v3))
                    for j in range(used):
                        sums = floats_at(q, at_q + (k + j) * columns + left, width)
                        for c in range(whole * LANES, width):
                            product = floats_at(here, c, 1)[0] * weights[0, j]
                            sums[c] += product + floats_at(below, c, 1)[0] * weights[1, j]
        at_p += rank * rows
        at_q += rank * columns


@inline
def sum_of_four(f0: Any, f1: Any, f2: Any, f3: Any, w0: Any, w1: Any, w2: Any, w3: Any) -> Any:
    """Sixteen entries of a row of P Q'."""
    return (load_sixteen(f0) * w0 + load_sixteen(f1) * w1) + (load_sixteen(f2) * w2 + load_sixteen(f3) * w3)


def _expand(out: Any, rest: Any, places: Any, rank: Any, p: Any, q: Any, own: Any, zeros: Any) -> None:
    """out = P Q', and rest -= P own', by address; either may be 0, and is then left out."""
    at_p, at_q = np.int64(0), np.int64(0)
    weights = np.empty(TOGETHER, np.float32)
    for n in range(places.shape[0]):
        start, rows, columns = places[n, 0], places[n, 1], places[n, 2]
        for left in range(0, columns, BLOCK):
            width = min(BLOCK, columns - left)
            whole = width // LANES
            for k in range(0, rank, TOGETHER):
                used = min(TOGETHER, rank - k)
                q0, q1, q2, q3 = four(q, at_q, columns, left, k, rank, zeros)
                o0, o1, o2, o3 = four(own, at_q, columns, left, k, rank, zeros)
                for i in range(rows):
                    weights[:] = np.float32(0)
                    for j in range(used):
                        weights[j] = floats_at(p, at_p + (k + j) * rows + i, 1)[0]
                    w0, w1 = sixteen(weights[0]), sixteen(weights[1])
                    w2, w3 = sixteen(weights[2]), sixteen(weights[3])
                    here = 4 * (start + i * columns + left)
                    if out:
                        streams = (out + here) & (BYTES - 1) == 0 and rank <= TOGETHER
                        for c in range(whole):
                            by = c * BYTES
                            mean = sum_of_four(q0 + by, q1 + by, q2 + by, q3 + by, w0, w1, w2, w3)
                            if k:
                                mean = mean + load_sixteen(out + here + by)
                            if streams:
                                stream(out + here + by, mean)
                            else:
                                store(out + here + by, mean)
                    if rest:
                        for c in range(whole):
                            by = c * BYTES
                            mine = sum_of_four(o0 + by, o1 + by, o2 + by, o3 + by, w0, w1, w2, w3)
                            prefetch(rest + here + by + 4 * columns)
                            store(rest + here + by, load_sixteen(rest + here + by) - mine)
                    for c in range(whole * LANES, width):
                        mean_, mine_ = np.float32(0), np.float32(0)
                        for j in range(used):
                            place = at_q + (k + j) * columns + left + c
                            if out:
                                mean_ += floats_at(q, place, 1)[0] * weights[j]
                            if rest:
                                mine_ += floats_at(own, place, 1)[0] * weights[j]
                        if out:
                            cell = floats_at(out + here, c, 1)
                            cell[0] = cell[0] + mean_ if k else mean_
                        if rest:
                            floats_at(rest + here, c, 1)[0] -= mine_
        at_p += rank * rows
        at_q += rank * columns
    settle()


_PLACES = "int64[:, ::1]"
_TIMES_Q = compile_now(_times_q, [f"void(int64, int64, int64, {_PLACES}, int64, int64, int64, int64)"])
_TIMES_P = compile_now(_times_p, [f"void(int64, {_PLACES}, int64, int64, int64, int64)"])
_EXPAND = compile_now(_expand, [f"void(int64, int64, {_PLACES}, int64, int64, int64, int64, int64)"])


def times_q_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int,
    residual: Tensor | None = None, total: Tensor | None = None,
) -> bool:  # fmt: skip
    """See `kernels.products`."""
    given = x.data_ptr(), address(residual), address(total), _places(matrices), rank
    _TIMES_Q(*given, p.data_ptr(), q.data_ptr(), ZEROS_AT)
    return True


def times_p_(x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int) -> bool:
    """See `kernels.products`."""
    _TIMES_P(x.data_ptr(), _places(matrices), rank, p.data_ptr(), q.data_ptr(), ZEROS_AT)
    return True


def expand_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int, subtract: bool = False
) -> bool:
    """See `kernels.products`."""
    out, rest = (0, x.data_ptr()) if subtract else (x.data_ptr(), 0)
    _EXPAND(out, rest, _places(matrices), rank, p.data_ptr(), q.data_ptr(), q.data_ptr(), ZEROS_AT)
    return True


def expand_and_subtract_(
    x: Tensor, rest: Tensor, p: Tensor, q: Tensor, own: Tensor, matrices: Sequence[Place], rank: int
) -> bool:
    """See `kernels.products`."""
    given = x.data_ptr(), rest.data_ptr(), _places(matrices), rank
    _EXPAND(*given, p.data_ptr(), q.data_ptr(), own.data_ptr(), ZEROS_AT)
    return True


def _places(matrices: Sequence[Place]) -> Any:
    return np.array(matrices, np.int64).reshape(-1, 3)
