"""One bit an entry (EF-signSGD: Karimireddy et al., ICML 2019; by blocks: Zheng et al., NeurIPS 2019)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tacit.contracts import Context, Decoded, OneShot, Payload, Sent
from tacit.errors import ConfigError
from tacit.kernels.payloads import expect_parts
from tacit.kernels.signs import BLOCK, Values, add_signs_, blocks, encode_signs, encode_signs_owed


class Signed(OneShot):
    """Says of each entry its sign, and what the signs are worth: a payload of (signs, highs[, lows])."""

    additive: ClassVar[bool] = False

    def exempts(self, shape: torch.Size) -> bool:
        """Biases and norms live on another scale than weights: they stay dense."""
        return len(shape) < 2

    @abstractmethod
    def parts(self, numel: int) -> tuple[tuple[str, int, torch.dtype], ...]:
        """What a payload of so many entries consists of: what, how many, of which type."""

    def check(self, payload: Payload, out: Tensor) -> None:
        """As `parts` says."""
        expect_parts(payload, out.numel(), *self.parts(out.numel()))

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Every entry is one of two values."""
        self.check(payload, out)
        add_signs_([_values(payload)], 1.0, out, fresh=True)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Unpack and add, in one pass."""
        self.check(payload, out)
        add_signs_([_values(payload)], weight, out, fresh=False)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """Unpack and add all of them, in one pass."""
        for payload in payloads:
            self.check(payload, out)
        add_signs_([_values(payload) for payload in payloads], 1 / len(payloads), out, fresh=True)

    def sent(self, payload: Payload, x: Tensor) -> Sent:
        """What the signs are worth, unpacked if somebody asks."""
        return Decoded(self, payload)


def _values(payload: Payload) -> Values:
    bits, highs, *lows = payload
    return bits, highs, lows[0] if lows else None


@dataclass(frozen=True)
class Sign(Signed):
    """Send the sign of every entry, and the mean magnitude: ceil(n / 8) + 4 bytes, to P - 1 peers.

    What arrives is mean|x| * sign(x), with sign(0) = 1. Put `ErrorFeedback` around it; without it sign
    descent need not converge.
    Difference from the papers: one magnitude for all tensors of a lot, or for each block of 512 entries of
    it, not one a tensor. Blocks follow the scales of layers and rows, for 6 % more bytes:
    ceil(n / 8) + 4 x ceil(n / 512).

    Attributes:
        block: None: one magnitude a lot. 512: one for each 512 entries.
    """

    block: Literal[512] | None = None

    def __post_init__(self) -> None:
        if self.block is not None and (type(self.block) is not int or self.block != BLOCK):
            raise ConfigError(
                f"block={self.block!r} cannot be: signs are packed 512 at a time; write 512 for a "
                "magnitude in each of these blocks, or None for one in all"
            )

    def parts(self, numel: int) -> tuple[tuple[str, int, torch.dtype], ...]:
        """Signs, and magnitudes."""
        count = blocks(numel) if self.block else 1
        return ("signs", -(-numel // 8), torch.uint8), ("magnitudes", count, torch.float32)

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed signs, magnitudes)."""
        bits, means = self._buffers(x, ctx)
        encode_signs(x, bits, means, None)
        return bits, means if self.block else _overall(means, x.numel())

    def encode_owed(self, x: Tensor, residual: Tensor, owed: Tensor, ctx: Context) -> Payload:
        """One pass by blocks; with one magnitude, known only at the end, a second one that subtracts."""
        bits, means = self._buffers(x, ctx)
        encode_signs_owed(x, residual, owed, bits, means, None, keep=self.block is not None)
        if self.block:
            return bits, means
        magnitude = _overall(means, x.numel())
        add_signs_([(bits, magnitude, None)], -1.0, owed, fresh=False)
        return bits, magnitude

    def _buffers(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        bits = ctx.scratch("bits", x, (-(-x.numel() // 8),), torch.uint8)
        return bits, ctx.scratch("means", x, (blocks(x.numel()),), torch.float32)


def _overall(means: Tensor, numel: int) -> Tensor:
    """The mean over all entries, of those over blocks; the last block may be shorter."""
    missing = means.numel() * BLOCK - numel
    wide = means.double()
    return ((wide.sum() * BLOCK - wide[-1:].sum() * missing) / max(1, numel)).float().view(1)
