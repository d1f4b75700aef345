"""A few bits an entry, to the nearest level, by blocks (block-wise quantisation: Dettmers et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import AddingCodec, Compressor, Context, FusedCodec, Payload
from tacit.kernels.blockwise import add_blocks_, encode_blocks
from tacit.kernels.payload_layout import block_count, blocks_bytes
from tacit.kernels.payloads import expect_parts

VECTOR_BITS = 8
"""Of the levels of biases and norms: so few entries are cheap, and their blocks hold several parameters."""


@dataclass(frozen=True)
class Blockwise(FusedCodec, AddingCodec):
    """Send each entry as the nearest of 2^bits - 1 levels, to P - 1 peers.

    The levels reach from minus to plus the largest magnitude of each block of 512 entries; a block's unit,
    that magnitude / (2^(bits - 1) - 1), is sent in bf16. Bytes: bits x n / 8 + 2 x ceil(n / 512); of 2 bits
    ceil(n / 5) + 2 x ceil(n / 512), as three levels fit into 1.6 bits. It is biased: what rounding leaves
    out must be kept, by `ErrorFeedback` or by `LocalResidual`. Biases and norms (parameters of fewer than two
    dimensions) are sent in 8 bits.
    Differences from the paper (8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861): equal steps,
    fewer bits, and blocks of 512, not 2048.

    Attributes:
        bits: of a level, 2 to 8.
    """

    bits: int = 3

    sliceable: ClassVar[bool] = True
    scales: ClassVar[bool] = False
    shows_nonfinite: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    sent_lasts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("bits", self.bits, 2, 8, "write 3, or from 2 to 8 for a level and its sign")

    def exempts(self, shape: torch.Size) -> bool:
        """Biases and norms, as their scale differs from that of weights."""
        return len(shape) < 2 and self.bits < VECTOR_BITS

    def exempted(self) -> Compressor:
        """The same with 8 bits."""
        return Blockwise(VECTOR_BITS)

    def encode(
        self, x: Tensor, ctx: Context, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Payload:
        """(packed levels, one unit for each block)."""
        codes = ctx.scratch("codes", x, (blocks_bytes(x.numel(), self.bits),), torch.uint8)
        units = ctx.scratch("units", x, (block_count(x.numel()),), torch.bfloat16)
        encode_blocks(x, self.bits, codes, units, residual, new_residual)
        return codes, units

    def block_sizes(self, numel: int) -> tuple[int, ...]:
        """Of levels, and of units."""
        return blocks_bytes(numel, self.bits), block_count(numel)

    def check(self, payload: Payload, out: Tensor) -> None:
        """Expects levels, and units."""
        numel = out.numel()
        levels = ("levels", blocks_bytes(numel, self.bits), torch.uint8)
        expect_parts(payload, numel, levels, ("units", block_count(numel), torch.bfloat16))

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_blocks_(payloads, self.bits, weight, out, fresh)
