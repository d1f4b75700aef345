"""The compiled half of `select`: one pass that adds what is owed, finds what is large, and keeps the rest.

Blocks of 16 entries are looked at together where `lanes` can be compiled, else entry by entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled
from tacit.kernels.select import SPARE

PIECE = SPARE
"""Entries between two looks at whether there is still room."""

try:
    from tacit.kernels.lanes import WIDTH, sift_lanes
except Exception:  # the compiler's inner parts are not what they were: do without
    WIDTH, sift_lanes = 16, None


def _sift(x: Any, residual: Any, owed: Any, threshold: Any, index: Any, values: Any) -> Any:
    """Write a = x + residual to `owed`; where |a| >= threshold, 0, and its place to `index`, it to `values`.

    Returns:
        How many were found, or -1 where there was no room; `owed` is then unfinished.
    """
    found = np.int64(0)
    whole = x.shape[0] - x.shape[0] % WIDTH
    for piece in range(0, whole, PIECE):
        if found + PIECE > index.shape[0]:
            return -1
        for start in range(piece, min(piece + PIECE, whole), WIDTH):
            found = sift_lanes(x, residual, owed, start, threshold, index, values, found)
    if found + WIDTH > index.shape[0]:
        return -1
    for i in range(whole, x.shape[0]):
        a = x[i] + residual[i]
        hit = abs(a) >= threshold
        owed[i] = x.dtype.type(0) if hit else a
        index[found] = i
        values[found] = a
        found += np.int64(hit)
    return found


def _sift_one_by_one(x: Any, residual: Any, owed: Any, threshold: Any, index: Any, values: Any) -> Any:
    """`_sift`, an entry at a time."""
    found = np.int64(0)
    for piece in range(0, x.shape[0], PIECE):
        if found + PIECE > index.shape[0]:
            return -1
        for i in range(piece, min(piece + PIECE, x.shape[0])):
            a = x[i] + residual[i]
            hit = abs(a) >= threshold
            owed[i] = x.dtype.type(0) if hit else a
            index[found] = i
            values[found] = a
            found += np.int64(hit)
    return found


def _scan(x: Any, threshold: Any, index: Any, values: Any) -> Any:
    """`_sift` where nothing is owed, before or after."""
    found = np.int64(0)
    whole = x.shape[0] - x.shape[0] % WIDTH
    for piece in range(0, whole, PIECE):
        if found + PIECE > index.shape[0]:
            return -1
        for start in range(piece, min(piece + PIECE, whole), WIDTH):
            found = sift_lanes(x, None, None, start, threshold, index, values, found)
    if found + WIDTH > index.shape[0]:
        return -1
    for i in range(whole, x.shape[0]):
        index[found] = i
        values[found] = x[i]
        found += np.int64(abs(x[i]) >= threshold)
    return found


def _scan_one_by_one(x: Any, threshold: Any, index: Any, values: Any) -> Any:
    """`_scan`, an entry at a time."""
    found = np.int64(0)
    for piece in range(0, x.shape[0], PIECE):
        if found + PIECE > index.shape[0]:
            return -1
        for i in range(piece, min(piece + PIECE, x.shape[0])):
            index[found] = i
            values[found] = x[i]
            found += np.int64(abs(x[i]) >= threshold)
    return found


def _settle(index: Any, values: Any, least: Any, equal: int, owed: Any) -> Any:
    """Keep, moved to the front, what is larger than `least`, and of what is equal the first `equal`.

    What is not kept is given back to `owed`, where that is not empty. How many are kept.
    """
    kept = 0
    for j in range(index.shape[0]):
        magnitude = abs(values[j])
        keep = magnitude > least
        if magnitude == least and equal > 0:
            equal -= 1
            keep = True
        if keep:
            index[kept] = index[j]
            values[kept] = values[j]
            kept += 1
        elif owed.shape[0]:
            owed[index[j]] = values[j]
    return kept


_REALS = ("float32", "float64")
_SIFT = [f"int64({x}[::1], {x}[::1], {x}[::1], {x}, int32[::1], {x}[::1])" for x in _REALS]
_SCAN = [f"int64({x}[::1], {x}, int32[::1], {x}[::1])" for x in _REALS]


def one_by_one() -> tuple[Any, Any]:
    """`sift` and `scan` without `lanes`."""
    return compiled(_sift_one_by_one, _SIFT), compiled(_scan_one_by_one, _SCAN)


def _compile() -> tuple[Any, Any]:
    try:
        return compiled(_sift, _SIFT), compiled(_scan, _SCAN)
    except Exception:  # numba's or LLVM's inner parts are not what they were: the slower way is as right
        return one_by_one()


sift, scan = _compile()
settle = compiled(_settle, [f"int64(int32[::1], {x}[::1], {x}, int64, {x}[::1])" for x in _REALS])
