"""`kernels.narrow` by Triton: one pass over memory."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.triton.launch import jit, launch_by_rows, philox_keys
from tacit.kernels.triton.primitives import NAN, random_uint16

BLOCK = 512
LANES = tl.constexpr(BLOCK // 8)


@jit
def round_kernel(
    x: tensor, out: tensor, key0: tensor, key1: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Add random bits to the lower half, and keep the upper one."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, place = row.to(tl.int64)[:, None], tl.arange(0, 8 * LANES)[None, :]
    mask = (row < first + count)[:, None] & (place < size)
    at = wide * (8 * LANES) + place
    a = tl.load(x + at, mask, 0.0)
    random = random_uint16(key0, key1, wide * LANES, lanes, place)
    above = (a.to(tl.int32, bitcast=True) + random) >> 16
    tl.store(out + at, tl.where(a == a, above, NAN >> 16).to(tl.int16), mask)


def round_at_random(x: Tensor, seed: int, out: Tensor) -> None:
    """See `kernels.narrow`."""
    launch_by_rows(round_kernel, x, BLOCK, 8, x, out, *philox_keys(seed))
