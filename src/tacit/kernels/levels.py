"""Stochastic rounding to a few levels, packed: what QSGD and TernGrad send.

A bucket of entries shares one unit; each entry becomes a whole number of units from -top to top, where top =
2^(bits - 1) - 1, rounded up or down at random so that it is right in the mean. Each entry takes 16 random
bits, so the mean is right to 2^-17 of a unit.

Codes (level + top) are packed as `layout` describes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import kernel

BY_LARGEST, BY_NORM = 0.0, -1.0
"""Two values of `clip`: the top level is the bucket's largest magnitude, or its Euclidean norm."""


@kernel("x")
def quantize(x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor) -> None:
    """Write the levels of the flat `x` to `codes` (uint8), and the unit of each bucket to `units` (fp32).

    A bucket whose unit would be below 2^-126 sends zeros; magnitudes count as 3.4e38 at most.

    Args:
        bits: of a code, 2 to 8.
        bucket: entries that share a unit, a power of two from 64 on.
        clip: what the top level stands for: `BY_LARGEST`; `BY_NORM`; or a multiple of the bucket's root mean
            square, but at most the largest magnitude. What lies beyond is clipped.
        seed: 64 bits; other seeds, other random bits.
    """


@kernel("out")
def add_levels_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
