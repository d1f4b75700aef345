"""One bit an entry, and two values for each block (1-bit SGD: Seide et al., Interspeech 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.compressors.sign import Signed
from tacit.contracts import Context, FusedCodec, Payload
from tacit.kernels.payload_layout import block_count
from tacit.kernels.signs import encode_signs


@dataclass(frozen=True)
class OneBit(FusedCodec, Signed):
    """Send the sign of every entry, and two means: of the negative entries, and of all others.

    Each entry arrives as one of the two means; for these signs no pair of values is nearer to x. Bytes:
    ceil(n / 8) + 8 x ceil(n / 512), to P - 1 peers. Put `ErrorFeedback` around it, as the paper does; without
    it nothing need converge. Differences from the paper: a pair of values for each block of 512 entries, not
    for each column of a matrix; zeros stay zeros, as with `Sign(block=512)`.
    """

    def parts(self, numel: int) -> tuple[tuple[str, int, torch.dtype], ...]:
        """Signs, and two means for each block."""
        means = block_count(numel), torch.float32
        return ("signs", -(-numel // 8), torch.uint8), ("high means", *means), ("low means", *means)

    def encode(
        self, x: Tensor, ctx: Context, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Payload:
        """(packed signs, means of entries of 0 or more, means of negative entries)."""
        count = (block_count(x.numel()),)
        bits = ctx.scratch("bits", x, (-(-x.numel() // 8),), torch.uint8)
        highs = ctx.scratch("highs", x, count, torch.float32)
        lows = ctx.scratch("lows", x, count, torch.float32)
        encode_signs(x, bits, highs, lows, True, residual, new_residual)
        return bits, highs, lows
