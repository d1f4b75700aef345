"""The Triton version of `int8`: round, and keep what is owed; add any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.cuda.launch import jitted, peers, start_by_rows
from tacit.kernels.cuda.pieces import inverted, largest, put, real, rounded, summed

BLOCK, ROWS_AT_A_TIME = 512, 4
MAGIC = tl.constexpr(12582912.0)
"""Added and taken away again, it rounds to the nearest whole number, to the even one of two."""


@jitted
def encode_kernel(
    x: tensor, residual: tensor, new_residual: tensor, codes: tensor, units: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OWES: tl.constexpr,
) -> None:  # fmt: skip
    """The nearest levels of each block, and what they do not say."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * BLOCK + i
    mask = (row < first + count)[:, None] & (i < size)
    a = summed(x, residual, at, mask, OWES)
    unit = tl.div_rn(largest(a), 127.0)
    inverse = inverted(unit)
    unit = tl.where(inverse > 0, unit, 0.0)
    tl.store(units + row, unit, row < first + count)
    level = tl.minimum(tl.maximum(a * inverse[:, None], -127.0), 127.0)
    level = (level + MAGIC) - MAGIC
    tl.store(codes + at, level.to(tl.int32) & 255, mask)
    if OWES:
        put(new_residual, at, a - rounded(rounded(unit, x)[:, None] * level, x), mask)


@jitted
def add_kernel(
    codes: tensor, units: tensor, out: tensor, codes_step: tensor, units_step: tensor, peers: tensor,
    weight: tensor, first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer says, in their order."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, i = row.to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    there, at = (row < first + count)[:, None], wide * BLOCK + i
    mask = there & (i < size)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if not FRESH:
        total = real(out, at, mask)
    for _ in range(peers):
        level = tl.load(codes + at, mask, 0).to(tl.int8, bitcast=True).to(tl.float32)
        unit = rounded(rounded(tl.load(units + wide, there, 0.0), out) * weight, out)
        total = rounded(total + rounded(unit * level, out), out)
        codes += codes_step
        units += units_step
    put(out, at, total, mask)


def encode(
    x: Tensor, residual: Tensor | None, new_residual: Tensor | None, codes: Tensor, units: Tensor
) -> None:
    """`int8.encode_int8`, and `encode_int8_owed` where there are `residual` and `owed`."""
    has_feedback = residual is not None and new_residual is not None
    start_by_rows(
        encode_kernel, x, BLOCK, 1, x, residual if has_feedback else x, new_residual if has_feedback else x,
        codes, units, BLOCK=BLOCK, OWES=has_feedback, rows=ROWS_AT_A_TIME,
    )  # fmt: skip


def add(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """`int8.add_int8_`."""
    for run in peers(payloads):
        start_by_rows(
            add_kernel, out, BLOCK, 1, *run.first, out, *run.steps, run.number, weight,
            BLOCK=BLOCK, FRESH=fresh, rows=ROWS_AT_A_TIME,
        )  # fmt: skip
        fresh = False
