"""Predictors without weights: no change, or a continuation of the last changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.prediction.predictor import Predictor, Seen


@dataclass(frozen=True)
class Stale(Predictor):
    """No change: what is not sent stays as it is. The baseline for all others."""

    depth: ClassVar[int] = 1
    on_device: ClassVar[bool] = True

    @property
    def operations(self) -> int:
        """Zero operations."""
        return 0

    def change(self, seen: Seen, kind: str) -> Tensor:
        """Zeros."""
        return torch.zeros_like(seen.changes[-1])


@dataclass(frozen=True)
class Persistent(Predictor):
    """Each change is followed by a share of itself, as with momentum.

    Attributes:
        factor: the share that is left from round to round, in [0, 1]. More trusts the last change more.
    """

    factor: float = 0.5

    depth: ClassVar[int] = 1
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, "write 0.5, as is usual", least=0, most=1)

    def change(self, seen: Seen, kind: str) -> Tensor:
        """The last received change, times the factor for each round since then."""
        change: Tensor = seen.changes[-1] * torch.pow(self.factor, seen.ages[-1])
        return change.to(seen.changes.dtype)


@dataclass(frozen=True)
class Linear(Predictor):
    """The mean of the last two received changes.

    That is the slope of the least-squares line through three values, between which the changes lie.
    """

    on_device: ClassVar[bool] = True

    @property
    def operations(self) -> int:
        """A sum and a product."""
        return 2

    def change(self, seen: Seen, kind: str) -> Tensor:
        """The mean of the last two changes."""
        before, last = seen.changes[-2:]
        change: Tensor = before * 0.5 + last * 0.5
        return change


@dataclass(frozen=True)
class Exponential(Predictor):
    """Changes that shrink by a constant factor a round, as towards a limit.

    With the last received change d1, a rounds ago, and d0 before it, g rounds earlier:

        factor = (d1 / d0)^(1 / g), within [0, 1];   change = d1 factor^a

    Growth is not extrapolated, nor is that from nothing (d0 = 0): the factor is 1. A change of sign
    is not predicted.
    """

    on_device: ClassVar[bool] = True

    @property
    def operations(self) -> int:
        """A quotient, its bounds, a difference and a quotient of ages, a power, a product."""
        return 8

    def change(self, seen: Seen, kind: str) -> Tensor:
        """The last change times factor^a."""
        before, last = seen.changes[-2:]
        factor = torch.where(before == 0, 1.0, last / before).clamp(0.0, 1.0)
        older, age = seen.ages[-2:]
        change: Tensor = last * factor.pow(age / (older - age)).to(last.dtype)
        return change
