"""What a predictor is: a pure function of an element's last changes, equal to the bit wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

KINDS = ("convolution", "linear", "embedding", "vector")
"""What an element may belong to; "vector": a bias, or a norm's weight."""


def kind_of(dims: int) -> str:
    """The kind of a parameter of so many dims, as far as these tell it: an embedding looks like a linear."""
    return "vector" if dims < 2 else "linear" if dims == 2 else "convolution"


class Predictor(ABC):
    """Predicts the next change of each element. A frozen dataclass: a value, without state."""

    depth: ClassVar[int] = 4
    """How many changes it looks back."""

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
