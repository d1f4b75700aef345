"""How far replicas are from their mean: the consensus distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tacit.contracts import WORLD
from tacit.exchange.joined_requests import average_, gather
from tacit.replicas.replica import Replica
from tacit.session import Session

__all__ = ["Consensus", "ConsensusMeter"]

_CHUNK = 1 << 18
"""Entries that are looked at together, so that it takes little memory."""


@dataclass(frozen=True)
class Consensus:
    """How far the replicas were apart at some time; equal on all ranks.

    Attributes:
        step: after so many steps.
        distance: the mean over the replicas of ||x_i - mean x||, of all parameters as one vector.
        relative: that over ||mean x||; 0 where the mean is 0.
    """

    step: int
    distance: float
    relative: float

    def metrics(self) -> dict[str, float]:
        """As `session.metrics` tells it."""
        return {"consensus_distance": self.distance, "consensus_relative": self.relative}


class ConsensusMeter:
    """Measures it where a mean of all replicas is at hand, or by making one.

    Each rank has its own distance; one small message tells all of them the mean.

    Args:
        session: whose replicas they are. Not measured where there is one, or where nobody waits for others.

    Attributes:
        last: what was measured last; None before.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._apart: list[float] = []
        self._length: list[float] = []
        self._is_possible = len(session.ranks) > 1 and not session.strategy.independent
        self.last: Consensus | None = None

    def leave_out(self) -> None:
        """Measure nothing: a rank has only a shard of its replica."""
        self._is_possible = False

    def begin(self) -> None:
        """Measure anew."""
        self._apart.clear()
        self._length.clear()

    def add(self, own: Tensor, mean: Tensor, moved: Tensor | None = None) -> None:
        """A bucket of this replica, and the mean of all: `mean`, or `mean + moved`."""
        if not self._is_possible:
            return
        parts = zip(torch.split(own, _CHUNK), torch.split(mean, _CHUNK), strict=True)
        moves = iter(torch.split(moved, _CHUNK)) if moved is not None else None
        for mine, middle in parts:
            there = middle.double() if moves is None else middle.double() + next(moves)
            self._apart.append(float((mine.double() - there).square().sum()))
            self._length.append(float(there.square().sum()))

    def end(self, counted: bool = True) -> None:
        """All buckets were added. A collective call. `counted`: whether its bytes are training's."""
        if not self._is_possible:
            return
        mine = torch.tensor([math.sqrt(math.fsum(self._apart))], dtype=torch.float64)
        every = self._session.ask(lambda: gather(mine, WORLD), "consensus", counted=counted)
        distance = math.fsum(float(each) for each in every) / len(every)
        length = math.sqrt(math.fsum(self._length))
        self.last = Consensus(self._session.step, distance, distance / length if length else 0.0)

    def measure(self, replica: Replica) -> None:
        """Average copies of all replicas, which stay as they are. A collective call of the model's size.

        Its bytes are not counted as the training's.
        """
        if not self._is_possible:
            return
        self.begin()
        for i, bucket in enumerate(self._session.buckets):
            mean = replica.params(i).clone()
            self._session.ask(partial(average_, mean, WORLD), bucket.name, of=mean, counted=False)
            self.add(replica.params(i), mean)
        self.end(counted=False)

    def equal(self) -> None:
        """The replicas are equal."""
        if self._is_possible:
            self.last = Consensus(self._session.step, 0.0, 0.0)
