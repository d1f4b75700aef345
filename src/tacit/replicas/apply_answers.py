"""Applies answers to the anchor and to the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tacit.contracts import NODE, Application, State
from tacit.exchange.joined_requests import average_
from tacit.kernels import deltas
from tacit.replicas.local_deltas import LocalDeltas
from tacit.replicas.replica import Place, Replica, largest_of_types, part_for, wide_like
from tacit.session import Session


class Answers:
    """Lets the merge apply answers, to the parameters in place if that is possible.

    Args:
        session: its strategy has the merge.
        replica: the parameters.
        anchors: the anchor of each bucket, in the wide type.
        flats: the mean of each bucket, once it is there.
        local: this rank's delta of each.
        variances: names of buffers that are never below 0, and may be so at a server.

    Attributes:
        states: the merge's state of each bucket.
    """

    def __init__(
        self,
        session: Session,
        replica: Replica,
        anchors: Sequence[Tensor],
        flats: Sequence[Tensor],
        local: LocalDeltas,
        variances: Collection[str],
    ) -> None:
        self._session, self._replica, self._anchors, self._flats = session, replica, anchors, flats
        self._local, self._variances, self._merge = local, variances, session.strategy.merge
        self.states: list[State] = [self._merge.init(anchor) for anchor in anchors]
        largest = largest_of_types(session.buckets) if session.schedule.leaves_first else {}
        self._before = {dtype: wide_like(bucket) for dtype, bucket in largest.items()}

    def apply(
        self, i: int, at: Application, rates: Mapping[str, float], diverged_in_node: bool, leaves: bool
    ) -> None:
        """Apply the answer about bucket `i`.

        Args:
            diverged_in_node: whether the replicas of a node may differ; they are averaged first.
            leaves: whether the next round sends the delta from before this answer; it is written to what is
                sent.
        """
        anchor, before = self._anchors[i], None
        if leaves:
            before = self._before[self._session.buckets[i].dtype][: len(anchor)]
            before.copy_(self._replica.params(i))
        read = self._merge.reads_params in (("always", "late") if at.lag else ("always",))
        reads = read or diverged_in_node or self._local.reads_params(i) or at.peers == 1
        entrywise = self._merge.entrywise and not diverged_in_node
        for places, params in self._replica.overwritten(i, reads, entrywise):
            if diverged_in_node:
                self._average_in_node(i, params)
            self._apply(i, places, params, at, rates)
        if before is not None:
            deltas.subtract(before, anchor, self._local.outgoing[i])

    def _average_in_node(self, i: int, params: Tensor) -> None:
        """Overwrite `params` with the mean of the replicas of this node, which differ."""
        anchor = self._anchors[i]
        delta = self._replica.narrowed(i, params.sub_(anchor))
        self._session.ask(partial(average_, delta, NODE), "node", of=delta)
        torch.add(anchor, self._replica.widened(i, delta), out=params)

    def _apply(
        self, i: int, places: Sequence[Place], params: Tensor, at: Application, rates: Mapping[str, float]
    ) -> None:
        """Let the merge apply the answer to these parameters; if learning rates matter, rate by rate."""
        mine = self._local.of_answer(i, places, params)
        anchor, mean = (part_for(params, places, each[i]) for each in (self._anchors, self._flats))
        mean = self._replica.widened(i, mean)
        state = {field: part_for(params, places, each) for field, each in self.states[i].items()}
        for here, lr in self._spans(places, at, rates):
            self._merge.apply_(
                params[here],
                anchor[here],
                mean[here],
                None if mine is None else mine[here],
                {field: each[here] for field, each in state.items()},
                at._replace(lr=lr),
            )
        for place in places if self._variances else ():
            if place.name in self._variances:
                params[_within([place], places)].clamp_(min=0.0)

    def _spans(
        self, places: Sequence[Place], at: Application, rates: Mapping[str, float]
    ) -> Iterator[tuple[slice, float]]:
        """The spans of parameters for one call of the merge each, and their learning rate."""
        if not self._merge.by_learning_rate:
            yield slice(None), at.lr
            return
        for lr, run in groupby(places, lambda place: rates.get(place.name, 0.0)):
            yield _within([*run], places), lr


def _within(some: Sequence[Place], places: Sequence[Place]) -> slice:
    """The span of some parameters among neighbouring ones; all of it, if they are all, in any shape."""
    if len(some) == len(places):
        return slice(None)
    return slice(some[0].start - places[0].start, some[-1].stop - places[0].start)
