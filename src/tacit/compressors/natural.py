"""Powers of two, at random (natural compression: Horváth et al., MSML 2022, arXiv 1905.10988)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import AddingCodec, Context, Payload
from tacit.kernels.exponents import add_exponents_, encode_exponents
from tacit.kernels.payloads import expect_parts


@dataclass(frozen=True)
class Natural(AddingCodec):
    """Round each entry to one of the two powers of two next to it, at random; right in the mean.

    Sign and exponent of fp32 travel, 9 bits as in the paper: n + ceil(n / 8) bytes, to P - 1 peers. The mean
    square of what arrives is at most 9/8 of the entry's, so no error feedback is needed, and no scale: all of
    fp32's range is there, but for what lies above 2^127. Powers do not add up on the way (all-gather), so it
    moves fewer bytes than fp32 among up to 7 peers.
    """

    sliceable: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: rounding does as little harm to biases as to weights."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(exponents, packed signs)."""
        exponents = ctx.scratch("exponents", x, x.shape, torch.uint8)
        bits = ctx.scratch("bits", x, (-(-x.numel() // 8),), torch.uint8)
        encode_exponents(x, ctx.draw("natural", ctx.rank), exponents, bits)
        return exponents, bits

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        signs = ("signs", -(-numel // 8), torch.uint8)
        expect_parts(payload, numel, ("exponents", numel, torch.uint8), signs)

    def may_overflow(self, payload: Payload) -> bool:
        """Whether the largest exponent shows that entries may be infinite."""
        exponents = payload[0]
        return bool(exponents.numel()) and int(exponents.max()) >= 127 + 100

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_exponents_(payloads, weight, out, fresh)
