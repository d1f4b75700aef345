"""One bit an entry (EF-signSGD: Karimireddy et al., ICML 2019; by blocks: Zheng et al., NeurIPS 2019)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tacit.contracts import AddingCodec, Context, FusedCodec, Payload
from tacit.errors import ConfigError
from tacit.kernels.payload_layout import BLOCK, block_count
from tacit.kernels.payloads import SignPayload, expect_parts
from tacit.kernels.signs import add_signs_, encode_sign, encode_signs


class Signed(AddingCodec):
    """Send the sign of each entry, and the values that signs stand for: (signs, highs[, lows])."""

    sliceable: ClassVar[bool] = True
    shows_nonfinite: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    @abstractmethod
    def parts(self, numel: int) -> tuple[tuple[str, int, torch.dtype], ...]:
        """(name, number of elements, type) of each tensor of a payload for `numel` entries."""

    def check(self, payload: Payload, out: Tensor) -> None:
        expect_parts(payload, out.numel(), *self.parts(out.numel()))

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        """Each entry becomes one of the two values of its block."""
        add_signs_([_values(payload) for payload in payloads], weight, out, fresh)


def _values(payload: Payload) -> SignPayload:
    bits, highs, *lows = payload
    return bits, highs, lows[0] if lows else None


@dataclass(frozen=True)
class Sign(FusedCodec, Signed):
    """Send the sign of every entry, and the mean magnitude: ceil(n / 8) + 4 bytes, to P - 1 peers.

    What arrives is mean|x| * sign(x). Put `ErrorFeedback` around it; without it sign descent need not
    converge.

    With a magnitude for each block zeros stay zeros: where some entries of a block are zero, half of it is
    sent in a round (see `kernels.signs`), and the rest waits. With one a bucket sign(0) is 1: an entry that
    never has a gradient oscillates by that magnitude under error feedback, and does not drift.

    Difference from the papers: one magnitude for all tensors of a bucket, or for each block of 512 entries of
    it, not one a tensor. Blocks follow the scales of layers and rows, for 6 % more bytes:
    ceil(n / 8) + 4 x ceil(n / 512).

    Attributes:
        block: None: one magnitude a bucket. 512: one for each 512 entries.
    """

    block: Literal[512] | None = None

    def __post_init__(self) -> None:
        if self.block is not None and (type(self.block) is not int or self.block != BLOCK):
            raise ConfigError(
                f"block={self.block!r} is not possible: signs are packed 512 at a time; write 512 for a "
                "magnitude in each of these blocks, or None for one in all"
            )

    def parts(self, numel: int) -> tuple[tuple[str, int, torch.dtype], ...]:
        """Signs, and magnitudes."""
        count = block_count(numel) if self.block else 1
        return ("signs", -(-numel // 8), torch.uint8), ("magnitudes", count, torch.float32)

    def block_sizes(self, numel: int) -> tuple[int, ...] | None:
        """Of signs, and of magnitudes, where each block has one."""
        return (-(-numel // 8), block_count(numel)) if self.block else None

    def encode(
        self, x: Tensor, ctx: Context, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Payload:
        """(packed signs, magnitudes).

        One pass with blocks; with one magnitude, which is known only after it, a second pass subtracts.
        """
        bits = ctx.scratch("bits", x, (-(-x.numel() // 8),), torch.uint8)
        means = ctx.scratch("means", x, (block_count(x.numel()),), torch.float32)
        if self.block:
            encode_signs(x, bits, means, None, True, residual, new_residual)
            return bits, means
        magnitude = ctx.scratch("magnitude", x, (1,), torch.float32)
        encode_sign(x, bits, means, magnitude, residual, new_residual)
        return bits, magnitude
