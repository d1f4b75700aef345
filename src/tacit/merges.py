"""HOW the peers' answer is APPLIED."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.contracts import Merge


@dataclass(frozen=True)
class Replace(Merge):
    """The mean takes the place of what was exchanged: the gradient."""

    def apply_(self, now: Tensor, then: Tensor, mean: Tensor) -> None:
        """Keep the mean alone."""
        now.copy_(mean)


@dataclass(frozen=True)
class Average(Merge):
    """The last common point moves by the mean of all progress: the mean of all replicas."""

    def apply_(self, now: Tensor, then: Tensor, mean: Tensor) -> None:
        """`then + mean`, to the same bits on all ranks, as `then` and `mean` are equal on all."""
        torch.add(then, mean, out=now)
