"""The nearest of a few levels, packed, with a unit for each block of 512; in one pass.

An entry becomes the nearest whole number of units from -top to top, top = 2^(bits - 1) - 1; halfway, the even
one. The unit is the block's largest magnitude / top in bf16, rounded up, so that none lies beyond the top.
(fp16 would lack the range of fp32.) A block whose unit would be below 2^-126 sends zeros; magnitudes count as
the largest number of bf16 at most.

Codes (level + top) are packed as `layout` describes: of 2 bits, whose levels are three, five a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import kernel


@kernel("x", "residual", "new_residual")
def encode_blocks(
    x: Tensor, bits: int, codes: Tensor, units: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the packed levels of the flat `x` to `codes` (uint8), and a unit a block to `units` (bf16).

    With a residual x + residual is encoded, and its difference to what the payload decodes to is written to
    `new_residual`. `bits`: of a level, 2 to 8.
    """


@kernel("out")
def add_blocks_(
    payloads: Sequence[Sequence[Tensor]], bits: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
