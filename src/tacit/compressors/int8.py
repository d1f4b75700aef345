"""One byte an entry, by blocks (8-bit quantization: Dettmers, ICLR 2016; survey arXiv 2003.03009)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import AddingCodec, Context, FusedCodec, Payload
from tacit.kernels.int8 import add_int8_, encode_int8
from tacit.kernels.payload_layout import block_count
from tacit.kernels.payloads import expect_parts


@dataclass(frozen=True)
class Int8(FusedCodec, AddingCodec):
    """Send each entry as the nearest of 255 levels: n + 4 x ceil(n / 512) bytes, to P - 1 peers.

    The levels reach from minus to plus the largest magnitude of each block of 512 entries; the error is at
    most 1 / 254 of it. Levels do not add up on the way (all-gather), so it moves fewer bytes than fp32 among
    up to 7 peers, than bf16 up to 3; beyond, `QSGD` or `Sign` do. Difference from Dettmers: equal steps, not
    a dynamic tree.
    """

    sliceable: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    shows_nonfinite: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def encode(
        self, x: Tensor, ctx: Context, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Payload:
        """(levels as bytes, one unit for each block)."""
        codes = ctx.scratch("codes", x, x.shape, torch.uint8)
        units = ctx.scratch("units", x, (block_count(x.numel()),), torch.float32)
        encode_int8(x, codes, units, residual, new_residual)
        return codes, units

    def block_sizes(self, numel: int) -> tuple[int, ...]:
        """Of levels, and of units."""
        return numel, block_count(numel)

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        units = ("units", block_count(numel), torch.float32)
        expect_parts(payload, numel, ("levels", numel, torch.uint8), units)

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_int8_(payloads, weight, out, fresh)
