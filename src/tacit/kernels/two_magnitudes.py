"""A sign and one of two magnitudes an entry, packed, with both magnitudes of each bucket.

The magnitudes are the means of those above the bucket's mean magnitude, and of the others, in bf16. A code
has bit 0 where its entry is of the larger ones, and bit 1 where it is negative; codes are packed as `layout`
describes. A bucket whose largest magnitude is below 2^-126 sends zeros; one with NaN or infinity the largest
numbers.

On a GPU plain torch runs: few values are sent so.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import kernel

BITS = 2
"""Of a code."""


@kernel("x", triton=())
def encode_magnitudes(x: Tensor, bucket: int, codes: Tensor, units: Tensor) -> None:
    """Write the codes of the flat `x` to `codes` (uint8), and each bucket's two means to `units` (bf16).

    `bucket`: entries that share them, a power of two from 64 on.
    """


@kernel("out", triton=())
def add_magnitudes_(
    payloads: Sequence[Sequence[Tensor]], bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
