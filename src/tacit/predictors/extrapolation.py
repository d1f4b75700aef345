"""Predictors without weights: nothing moves, or everything goes on as before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.predictors.predictor import Predictor


@dataclass(frozen=True)
class Stale(Predictor):
    """No change: what is not sent stays as it is. The least that any other has to beat."""

    @property
    def operations(self) -> int:
        """None to do."""
        return 0

    def change(self, past: Tensor, trend: Tensor, kind: str) -> Tensor:
        """Zeros."""
        return torch.zeros_like(past[0])


@dataclass(frozen=True)
class Persistent(Predictor):
    """Each change is followed by a share of itself, whatever was before it: momentum, as a receiver sees it.

    Attributes:
        factor: the share, in [0, 1]. More trusts the last change more.
    """

    factor: float = 0.5

    depth: ClassVar[int] = 1

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, "write 0.5, as is usual", least=0, most=1)

    def change(self, past: Tensor, trend: Tensor, kind: str) -> Tensor:
        """The last change, times the factor."""
        return past[-1] * self.factor


@dataclass(frozen=True)
class Linear(Predictor):
    """The line of least squares through the last five values, at the next: its slope is the change.

    With changes d1 .. d4 (d4 the newest) between the values, the slope is (4 d1 + 6 d2 + 6 d3 + 4 d4) / 20.
    """

    @property
    def operations(self) -> int:
        """Three sums, two products."""
        return 5

    def change(self, past: Tensor, trend: Tensor, kind: str) -> Tensor:
        """The slope."""
        ends, middle = past[0] + past[3], past[1] + past[2]
        return ends * 0.2 + middle * 0.3


@dataclass(frozen=True)
class Exponential(Predictor):
    """Changes that shrink by a constant factor, as towards a limit: the last one, times that factor.

    The factor is that of least squares from each change to the next, sum(d_i d_(i+1)) / sum(d_i^2), kept
    within [0, 1]: growth is not extrapolated, and what turns back and forth is not predicted.
    """

    @property
    def operations(self) -> int:
        """Four magnitudes, their largest, four quotients, two sums of three products, and the factor."""
        return 28

    def change(self, past: Tensor, trend: Tensor, kind: str) -> Tensor:
        """The last change, shrunk."""
        size = past.abs().amax(0)
        unit = past / torch.where(size > 0, size, 1.0)  # squares of very small or large changes are not told
        down = (unit[:-1] * unit[:-1]).sum(0)
        factor = (unit[:-1] * unit[1:]).sum(0) / torch.where(down > 0, down, 1.0)
        return past[-1] * factor.clamp(0.0, 1.0)
