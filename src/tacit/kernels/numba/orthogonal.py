"""`kernels.orthogonal` by numba: scaling and Gram-Schmidt of the rows of many matrices, in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.primitives import sum_by_halves

LANES = 64
TINY, LARGEST_EXPONENT = 2.0**-126, 126
DEPENDENT = 1e-6


@inline
def dot(first: Any, second: Any, partial: Any) -> Any:
    """The inner product, down 64 lanes and then in halves: in one order, whatever the processor."""
    partial[:] = 0
    for start in range(0, first.shape[0], LANES):
        left, right = first[start : start + LANES], second[start : start + LANES]
        for i in range(left.shape[0]):
            partial[i] += left[i] * right[i]
    return sum_by_halves(partial)


@inline
def largest_magnitude(row: Any, partial: Any) -> Any:
    """The largest magnitude; NaN is passed over."""
    partial[:] = 0
    for start in range(0, row.shape[0], LANES):
        part = row[start : start + LANES]
        for i in range(part.shape[0]):
            partial[i] = abs(part[i]) if abs(part[i]) > partial[i] else partial[i]
    return partial.max()


@inline
def subtract_multiple(row: Any, other: Any, times: Any) -> None:
    """Subtract `times` the other row."""
    for i in range(row.shape[0]):
        row[i] -= times * other[i]


@inline
def multiply(row: Any, factor: Any) -> None:
    """Multiply in place."""
    for i in range(row.shape[0]):
        row[i] *= factor


def _scale(q: Any, lengths: Any, rank: Any) -> None:
    """`orthogonal.scale_`."""
    real = q.dtype.type
    partial = np.empty(LANES, q.dtype)
    at = 0
    for size in lengths:
        for i in range(rank):
            row = q[at + i * size : at + (i + 1) * size]
            exponent = math.frexp(largest_magnitude(row, partial))[1]
            multiply(row, real(math.ldexp(1.0, -min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT))))
        at += rank * size


def _orthogonalize(p: Any, lengths: Any, rank: Any) -> None:
    """`orthogonal.orthogonalize_`."""
    real = p.dtype.type
    partial = np.empty(LANES, p.dtype)
    at = 0
    for size in lengths:
        for i in range(rank):
            row = p[at + i * size : at + (i + 1) * size]
            largest = largest_magnitude(row, partial)
            multiply(row, real(1) / largest if largest >= TINY else real(0))
            norm = rest = np.sqrt(dot(row, row, partial))
            for _ in range(2 if i else 0):
                for j in range(i):
                    other = p[at + j * size : at + (j + 1) * size]
                    subtract_multiple(row, other, dot(row, other, partial))
                rest = np.sqrt(dot(row, row, partial))
            multiply(row, real(1) / rest if rest > real(DEPENDENT) * norm else real(0))
        at += rank * size


_REALS = ("float32", "float64")
_FLAT = [f"void({x}[::1], int64[::1], int64)" for x in _REALS]
_SCALE, _ORTHOGONALIZE = compile_now(_scale, _FLAT), compile_now(_orthogonalize, _FLAT)


def scale_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """See `kernels.orthogonal`."""
    _SCALE(q.detach().numpy(), np.array(lengths, np.int64), rank)


def orthogonalize_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """See `kernels.orthogonal`."""
    _ORTHOGONALIZE(p.detach().numpy(), np.array(lengths, np.int64), rank)
