"""Rounding to bf16 at random: right in the mean, so that what is added to it bit by bit is not lost.

As a bit pattern, a number lies between two of bf16 as it does as a number: adding 16 random bits carries into
the upper half with just the probability that makes the result right in the mean (stochastic rounding).
"""

from __future__ import annotations

from torch import Tensor

from tacit.kernels.dispatch import FP32, kernel


@kernel("x", triton=FP32)
def round_at_random(x: Tensor, seed: int, out: Tensor) -> None:
    """Write the flat `x` (float32) to `out` (bfloat16), each entry rounded up or down at random.

    Infinity stays infinity, and NaN a NaN. `seed`: 64 bits; other seeds, other random bits.
    """
