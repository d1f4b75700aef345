"""One bit an entry (EF-signSGD: Karimireddy et al., ICML 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, Decoded, OneShot, Payload, Sent
from tacit.kernels.bits import add_signs_, pack_signs


@dataclass(frozen=True)
class Sign(OneShot):
    """Send the sign of every entry, and the mean magnitude: ceil(n / 8) + 4 bytes, to P - 1 peers.

    What arrives is mean|x| * sign(x), with sign(0) = 1. Difference from the paper: one magnitude for all
    tensors of a lot, not one a tensor. Put `ErrorFeedback` around it; without it sign descent need not
    converge.
    """

    additive: ClassVar[bool] = False

    def exempts(self, shape: torch.Size) -> bool:
        """Biases and norms live on another scale than weights: they stay dense."""
        return len(shape) < 2

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed signs, magnitude)."""
        bits = ctx.scratch("bits", x, (-(-x.numel() // 8),), torch.uint8)
        pack_signs(x, bits)
        return bits, torch.linalg.vector_norm(x, 1, dtype=torch.float32).div_(x.numel()).view(1)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Every entry is plus or minus the magnitude."""
        out.zero_()
        self.decode_add_(payload, out, 1.0)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Unpack and add, in one pass."""
        bits, magnitude = payload
        if out.is_meta:
            return
        add_signs_(bits, weight * float(magnitude), out)

    def sent(self, payload: Payload, x: Tensor) -> Sent:
        """Signs times magnitude, unpacked if somebody asks."""
        return Decoded(self, payload)
