"""No compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, Exact, OneShot, Payload, Transmitted
from tacit.kernels.payloads import expect_parts


@dataclass(frozen=True)
class Dense(OneShot):
    """Send every entry in its type. Bytes: 2 (P - 1) / P x n x b a rank (ring all-reduce).

    No copy: where the mean may overwrite the tensor, the tensor itself goes to the collective.
    """

    sliceable: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    hides_nonfinite: ClassVar[bool] = False
    inline: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter, as nothing is compressed."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """`ctx.out`, with the entries of `x`."""
        if x is not ctx.out:
            ctx.out.copy_(x)
        return (ctx.out,)

    def check(self, payload: Payload, out: Tensor) -> None:
        expect_parts(payload, out.numel(), ("entries", out.numel(), out.dtype))

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Copy, unless the payload is `out` itself."""
        if len(payload) != 1 or payload[0] is not out:
            self.check(payload, out)
            out.copy_(payload[0])

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        self.check(payload, out)
        out.add_(payload[0], alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """All of `x`, without error."""
        return Exact(x)
