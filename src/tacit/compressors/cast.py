"""Fewer bits an entry by rounding to a shorter floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, OneShot, Payload, Rounded, Sent


@dataclass(frozen=True)
class BF16(OneShot):
    """Send bfloat16: the range of fp32, 8 bits of precision. Bytes: 2 (P - 1) / P x 2n a rank.

    The sum is taken in bfloat16 too, by the collective itself; Gloo and NCCL both can, although torch's own
    `bf16_compress_hook` refuses Gloo. Survey (arXiv 2003.03009), quantization.
    """

    additive: ClassVar[bool] = True
    swallows: ClassVar[bool] = False
    light: ClassVar[bool] = True

    def exempts(self, shape: torch.Size) -> bool:
        """A rounded bias is as good as a rounded weight."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """Round to nearest even, into a buffer of n x 2 bytes."""
        wire = ctx.scratch("wire", x, x.shape, torch.bfloat16)
        wire.copy_(x)
        return (wire,)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Widen."""
        out.copy_(payload[0])

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Widen and add in one pass."""
        out.add_(payload[0], alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Sent:
        """`x` rounded; made only if somebody asks, as the mean has overwritten the payload."""
        return Rounded(x, torch.bfloat16)
