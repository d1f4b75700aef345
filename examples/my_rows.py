"""A method of one's own: the largest rows of what a replica has changed, seldom, and bounded steps."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import tacit
from tacit import contracts
from tacit.algorithms import algorithm
from tacit.compressors import ErrorFeedback


@dataclass(frozen=True)
class LargestRows(contracts.OneShot):
    """Of each matrix the rows of largest norm: a share of `ratio`, at least one."""

    ratio: float = 0.1
    matrices: tuple[contracts.Matrix, ...] = ()  # by with_layout
    additive: ClassVar[bool] = False

    def with_layout(self, matrices: tuple[contracts.Matrix, ...]) -> "LargestRows":
        return replace(self, matrices=matrices)

    def views(self, x: Tensor) -> list[Tensor]:
        return [x[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns) for m in self.matrices]

    def encode(self, x: Tensor, ctx: contracts.Context) -> contracts.Payload:
        views = self.views(x)
        rows = [m.norm(dim=1).topk(max(1, int(self.ratio * len(m)))).indices for m in views]
        return (*rows, *(m[of] for m, of in zip(views, rows, strict=True)))

    def decode_(self, payload: contracts.Payload, out: Tensor) -> None:
        self.decode_add_(payload, out.zero_(), 1.0)

    def decode_add_(self, payload: contracts.Payload, out: Tensor, weight: float) -> None:
        half = len(payload) // 2
        for m, rows, values in zip(self.views(out), payload[:half], payload[half:], strict=True):
            m.index_add_(0, rows, values, alpha=weight)

    def sent(self, payload: contracts.Payload, x: Tensor) -> contracts.Transmitted:
        return contracts.Decoded(self, payload)


@dataclass(frozen=True)
class AfterWarmUp(contracts.Rounds):
    """After each of the first steps, then seldom."""

    warm_up: int = 20
    period: int = 4

    def at(self, step: int, schedule_state: contracts.ScheduleState, part: int = 0) -> contracts.Sync | None:
        due = step < self.warm_up or (step + 1) % self.period == 0
        return contracts.Sync(apply_at=step) if due else None


@dataclass(frozen=True)
class Bounded(contracts.Merge):
    """The anchor moves by the mean delta, shortened to `longest` in each bucket."""

    longest: float = 1.0

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: contracts.State,
        at: contracts.Application,
    ) -> None:
        length = float(torch.linalg.vector_norm(mean))
        params.copy_(anchor.add_(mean, alpha=min(1.0, self.longest / max(length, 1e-30))))


@algorithm(family="periodic", paper="mine", compresses=True, changes="the largest rows, every few steps")
def mine(ratio: float = 0.1, period: int = 4, longest: float = 1.0) -> tacit.Strategy:
    """Rows of the delta by size, each step at first, and a step of bounded length."""
    return tacit.Strategy(
        subject="delta",
        rounds=AfterWarmUp(period=period),
        compressor=ErrorFeedback(LargestRows(ratio)),
        merge=Bounded(longest),
    )
