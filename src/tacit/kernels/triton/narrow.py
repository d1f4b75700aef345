"""`kernels.narrow` by Triton: one pass over memory."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.triton.launch import jit, launch_by_rows, philox_keys
from tacit.kernels.triton.primitives import NAN

BLOCK = 512
LANES = tl.constexpr(BLOCK // 8)


@jit
def round_kernel(
    x: tensor, out: tensor, key0: tensor, key1: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Add random bits to the lower half, and keep the upper one; each word is of two neighbours.

    See `random_uint16`, which draws words anew for each entry.
    """
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = (row < first + count)[:, None], row.to(tl.int64)[:, None]
    counter = wide * LANES + tl.arange(0, LANES)[None, :]
    seed = (key1.to(tl.uint32).to(tl.uint64) << 32) | key0.to(tl.uint32).to(tl.uint64)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    words = tl.philox(seed, low, high, low * 0, low * 0)
    inside = tl.arange(0, 2 * LANES)[None, :]
    for w in tl.static_range(4):
        random = tl.interleave(words[w] & 0xFFFF, words[w] >> 16).to(tl.int32)
        place = 2 * w * lanes + inside
        mask = there & (inside < 2 * lanes) & (place < size)
        a = tl.load(x + wide * (8 * LANES) + place, mask, 0.0)
        above = (a.to(tl.int32, bitcast=True) + random) >> 16
        tl.store(out + wide * (8 * LANES) + place, tl.where(a == a, above, NAN >> 16).to(tl.int16), mask)


def round_at_random(x: Tensor, seed: int, out: Tensor) -> None:
    """See `kernels.narrow`."""
    launch_by_rows(round_kernel, x, BLOCK, 8, x, out, *philox_keys(seed))
