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

_CHUNK = 1 << 18
"""The number of entries that are processed at a time, to save memory."""


@dataclass(frozen=True)
class Consensus:
    """The consensus distance of the replicas at some step; equal on all ranks.

    Attributes:
        step: the number of steps before it.
        distance: the mean over the replicas of ||x_i - mean x||, of all parameters as one vector.
        relative: that over ||mean x||; 0 where the mean is 0.
    """

    step: int
    distance: float
    relative: float

    def metrics(self) -> dict[str, float]:
        """The numbers for `session.metrics`."""
        return {"consensus_distance": self.distance, "consensus_relative": self.relative}


class ConsensusMeter:
    """Measures the distance when a mean of all replicas is computed anyway, or by computing one.

    Each rank computes its distance; one small message averages these.

    Args:
        session: has the replicas. Nothing is measured if there is one, or if replicas do not wait for each
            other.

    Attributes:
        last: the last measurement; None before.
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
        """Begin a measurement."""
        self._apart.clear()
        self._length.clear()

    def add(self, own: Tensor, mean: Tensor, moved: Tensor | None = None) -> None:
        """Add a bucket: `own` of this replica, and the mean of all replicas: `mean`, or `mean + moved`."""
        if not self._is_possible:
            return
        parts = zip(torch.split(own, _CHUNK), torch.split(mean, _CHUNK), strict=True)
        moves = iter(torch.split(moved, _CHUNK)) if moved is not None else None
        for mine, middle in parts:
            there = middle.double() if moves is None else middle.double() + next(moves)
            self._apart.append(float((mine.double() - there).square().sum()))
            self._length.append(float(there.square().sum()))

    def end(self, counted: bool = True) -> None:
        """End, when all buckets were added. A collective call. `counted`: whether its bytes count as sent."""
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
        """Note that the replicas are equal: the distance is 0."""
        if self._is_possible:
            self.last = Consensus(self._session.step, 0.0, 0.0)
