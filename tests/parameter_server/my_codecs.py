"""Compressors of an outsider, in a module that workers and server import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, Decoded, OneShot, Payload, Transmitted


@dataclass(frozen=True)
class OneScale(OneShot):
    """A byte an entry, in equal steps of the range: n + 4 bytes."""

    levels: int = 127
    additive: ClassVar[bool] = False

    def exempts(self, shape: torch.Size) -> bool:
        return len(shape) < 2

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        codes = ctx.scratch("codes", x, x.shape, torch.int8)
        scale = ctx.scratch("scale", x, (1,), torch.float32)
        steps = ctx.scratch("steps", x, x.shape, x.dtype)
        scale.copy_(torch.linalg.vector_norm(x, torch.inf) / self.levels).clamp_(min=1e-30)
        codes.copy_(torch.div(x, scale, out=steps).round_())
        return codes, scale

    def decode_(self, payload: Payload, out: Tensor) -> None:
        codes, scale = payload
        out.copy_(codes).mul_(scale)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        codes, scale = payload
        out.add_(codes * (scale * weight))

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)
