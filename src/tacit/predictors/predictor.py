"""What a predictor is: a pure function of an element's last changes, equal to the bit wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

PIECE = 8192
"""Elements that are predicted at a time: what they take then stays in a core's cache."""
KINDS = ("convolution", "linear", "embedding", "vector")
"""What an element may belong to; "vector": a bias, or a norm's weight."""


def kind_of(dims: int) -> str:
    """The kind of a parameter of so many dims, as far as these tell it: an embedding looks like a linear."""
    return "vector" if dims < 2 else "linear" if dims == 2 else "convolution"


class Predictor(ABC):
    """Predicts the next change of each element. A frozen dataclass: a value, without state."""

    depth: ClassVar[int] = 4
    """How many changes it looks back."""

    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that it can tell of; others are predicted not to change."""
        return KINDS

    @property
    def operations(self) -> int | None:
        """Floating-point operations an element, at most, as they stand in the formulas; None: not counted."""
        return None

    @abstractmethod
    def change(self, past: Tensor, trend: Tensor, kind: str) -> Tensor:
        """The next change of `n` elements of one layer.

        Args:
            past: shape (depth, n), the last changes, newest last; not altered.
            trend: a scalar, the mean of the layer's next change over those elements of which it is known.
            kind: one of `KINDS`.

        Returns:
            Shape (n,), in the type of `past`. The same elements in the same calls give the same bits.
        """

    def write(
        self, past: Sequence[Tensor], trend: Tensor, kind: str, out: Tensor, scale: float = 1.0
    ) -> None:
        """Overwrite `out`, (n,), with `scale` times the next changes; `past`: `depth` tensors like it."""
        for start in range(0, out.numel(), PIECE):
            piece = slice(start, start + PIECE)
            seen = torch.stack([each[piece] for each in past])
            torch.mul(self.change(seen, trend, kind), scale, out=out[piece])
