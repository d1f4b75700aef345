"""The compiled half of `int8`: round, and keep what is owed, in one pass; add any number of peers in one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.jit import compiled, inlined
from tacit.kernels.parts import HUGE, inverted, largest
from tacit.kernels.pointers import bytes_at, float32_at
from tacit.kernels.split import summed

BLOCK = 512
TOP = np.float32(127)
MAGIC = np.float32(12582912.0)
"""Added and taken away again, it rounds to the nearest whole number, to the even one of two."""


@inlined
def rounded(piece: Any, inverse: Any, codes: Any) -> None:
    """The nearest level; the bytes are those of int8."""
    for i in range(piece.shape[0]):
        codes[i] = np.uint8(np.int32((piece[i] * inverse + MAGIC) - MAGIC))


@inlined
def subtracted(piece: Any, inverse: Any, unit: Any, codes: Any) -> None:
    """`rounded`, and what was said is taken away."""
    for i in range(piece.shape[0]):
        level = (piece[i] * inverse + MAGIC) - MAGIC
        codes[i] = np.uint8(np.int32(level))
        piece[i] -= unit * level


def _encode(x: Any, residual: Any, owed: Any, patterns: Any, codes: Any, units: Any) -> None:
    """See `int8`. Without error feedback `residual` is empty and `owed` is `x`; `patterns`: its bits."""
    pattern = np.empty(1, np.int32)
    most = pattern.view(np.float32)
    for b in range(units.shape[0]):
        begin, end = b * BLOCK, (b + 1) * BLOCK
        piece = owed[begin:end]
        if residual.shape[0]:
            summed(x[begin:end], residual[begin:end], piece)
        pattern[0] = largest(patterns[begin:end])
        unit = min(most[0], HUGE) / TOP
        inverse = inverted(unit)
        units[b] = unit if inverse > 0 else np.float32(0)
        if residual.shape[0]:
            subtracted(piece, inverse, units[b], codes[begin:end])
        else:
            rounded(piece, inverse, codes[begin:end])


def _add(codes: Any, units: Any, weight: Any, fresh: Any, out: Any) -> None:
    """Add `weight` times what each peer says, in their order."""
    for b in range((out.shape[0] + BLOCK - 1) // BLOCK):
        target = out[b * BLOCK : (b + 1) * BLOCK]
        if fresh:
            target[:] = 0
        for peer in range(codes.shape[0]):
            code = bytes_at(codes[peer], b * BLOCK, target.shape[0])
            unit = float32_at(units[peer], b) * weight
            for i in range(target.shape[0]):
                target[i] += unit * np.float32(np.int8(code[i]))


encode = compiled(
    _encode, ["void(float32[::1], float32[::1], float32[::1], int32[::1], uint8[::1], float32[::1])"]
)
add = compiled(_add, ["void(int64[::1], int64[::1], float32, boolean, float32[::1])"])
