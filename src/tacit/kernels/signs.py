"""Signs, with one or two values for each block of 512 entries; also with error feedback, in one pass.

Bits are packed as `layout` describes, 1 where an entry is not negative (so not for NaN). The values are the
mean
magnitude, or two: the mean of the entries that are not negative, and that of the others.

With `keep_zeros` zeros stay zeros. A block of which some entries are zeros sends the half of its entries that
has more magnitude: the sign bit of its first value marks it, and the lowest bit of that value says which half
it is, the entries in the lower four bits of each byte or those in the upper. The other four bits mark which
of these are not zero. The rest of the block decodes to zero, and waits where there is error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import kernel
from tacit.kernels.payloads import SignPayload


@kernel("x", "residual", "new_residual")
def encode_signs(
    x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None, keep_zeros: bool = False,
    residual: Tensor | None = None, new_residual: Tensor | None = None, subtract: bool = True,
) -> None:  # fmt: skip
    """Write one bit an entry of the flat `x`, and the values of each block (fp32).

    Args:
        bits: uint8, ceil(numel / 8); is overwritten.
        highs: for the mean magnitude of each block; where there are `lows`, for the mean of its entries that
            are not negative, and `lows` for that of those that are (0 where there are none).
        residual: is added to `x` first; `new_residual` becomes the difference of that sum to what the payload
            decodes to, or without `subtract` the sum itself.
    """


@kernel("x", "residual", "new_residual")
def encode_sign(
    x: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Write one bit an entry of the flat `x`, and the mean magnitude of all to `magnitude` (one fp32).

    With a residual x + residual is encoded, and its difference to what the payload decodes to is written to
    `new_residual`. `means` (fp32, one a block) is overwritten by the mean magnitude of each block.
    """


@kernel("out")
def add_signs_(payloads: Sequence[SignPayload], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times each payload, decoded, to the flat `out`, in order; `fresh`: to zeros."""
