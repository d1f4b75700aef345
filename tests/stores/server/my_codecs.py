"""Compressors of an outsider, in a module that workers and server import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, Decoded, Matrix, OneShot, Payload, Transmitted


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


@dataclass(frozen=True)
class FirstRows(OneShot):
    """The first row of each matrix."""

    matrices: tuple[Matrix, ...] = ()
    additive: ClassVar[bool] = False

    def exempts(self, shape: torch.Size) -> bool:
        return len(shape) < 2

    def with_layout(self, matrices: tuple[Matrix, ...]) -> FirstRows:
        return replace(self, matrices=matrices)

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        return (torch.cat([x[m.start : m.start + m.columns] for m in self.matrices]),)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        self.decode_add_(payload, out.zero_(), 1.0)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        for m, row in zip(self.matrices, payload[0].split([m.columns for m in self.matrices]), strict=True):
            out[m.start : m.start + m.columns].add_(row, alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)
