"""`kernels.int8` by Triton: levels and the residual; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.triton.launch import jit, launch_by_rows, payload_stacks
from tacit.kernels.triton.primitives import (
    largest_magnitude,
    load,
    load_sum,
    nearest_integer,
    round_to,
    safe_inverse,
    store,
)

BLOCK, ROWS_AT_A_TIME = 512, 4


@jit
def encode_kernel(
    x: tensor, residual: tensor, new_residual: tensor, codes: tensor, units: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """The nearest levels of each block, and the difference to what they decode to."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * BLOCK + i
    mask = (row < first + count)[:, None] & (i < size)
    a = load_sum(x, residual, at, mask, HAS_RESIDUAL)
    unit = tl.div_rn(largest_magnitude(a), 127.0)
    inverse = safe_inverse(unit)
    unit = tl.where(inverse > 0, unit, 0.0)
    tl.store(units + row, unit, row < first + count)
    level = tl.minimum(tl.maximum(a * inverse[:, None], -127.0), 127.0)
    level = nearest_integer(level)
    tl.store(codes + at, level.to(tl.int32) & 255, mask)
    if HAS_RESIDUAL:
        store(new_residual, at, a - round_to(round_to(unit, x)[:, None] * level, x), mask)


@jit
def add_kernel(
    codes: tensor, units: tensor, out: tensor, codes_step: tensor, units_step: tensor, peers: tensor,
    weight: tensor, first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer sent, decoded, in order."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, i = row.to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    there, at = (row < first + count)[:, None], wide * BLOCK + i
    mask = there & (i < size)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if not FRESH:
        total = load(out, at, mask)
    for _ in range(peers):
        level = tl.load(codes + at, mask, 0).to(tl.int8, bitcast=True).to(tl.float32)
        unit = round_to(round_to(tl.load(units + wide, there, 0.0), out) * weight, out)
        total = round_to(total + round_to(unit * level, out), out)
        codes += codes_step
        units += units_step
    store(out, at, total, mask)


def encode_int8(
    x: Tensor,
    codes: Tensor,
    units: Tensor,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:
    """See `kernels.int8`."""
    has_residual = residual is not None and new_residual is not None
    before, after = (residual, new_residual) if has_residual else (x, x)
    launch_by_rows(
        encode_kernel, x, BLOCK, 1, x, before, after, codes, units,
        BLOCK=BLOCK, HAS_RESIDUAL=has_residual, rows=ROWS_AT_A_TIME,
    )  # fmt: skip


def add_int8_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """See `kernels.int8`."""
    for stack in payload_stacks(payloads):
        launch_by_rows(
            add_kernel, out, BLOCK, 1, *stack.first, out, *stack.strides, stack.peers, weight,
            BLOCK=BLOCK, FRESH=fresh, rows=ROWS_AT_A_TIME,
        )  # fmt: skip
        fresh = False
