"""The nearest of 255 levels, one byte an entry, with a unit for each block of 512; in one pass.

The unit is the block's largest magnitude / 127. A block whose unit would be below 2^-126 sends zeros;
magnitudes count as 3.4e38 at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import kernel


@kernel("x", "residual", "new_residual")
def encode_int8(
    x: Tensor,
    codes: Tensor,
    units: Tensor,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:
    """Write the levels of the flat `x` to `codes` (uint8, the bytes of int8), and a unit a block (fp32).

    With a residual x + residual is encoded, and its difference to what the payload decodes to is written to
    `new_residual`.
    """


@kernel("out")
def add_int8_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
