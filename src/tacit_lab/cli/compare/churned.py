"""One run of a recipe whose replicas come and go: what its members say, as records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from tacit_lab import recipes
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.recipes.progress import MemberSign, Progress
from tacit_lab.records import ChurnRecord, EndRecord, Environment, EpochRecord, Record, RunKey, RunRecord
from tacit_lab.testbed import Result
from tacit_lab.testbed.churn import Churn

_PIECES = 60
"""So many pieces of a run have a rate of samples each, or as many as there are seconds."""


class ChurnedRun:
    """What the members of one run say, taken in sign by sign.

    Args:
        key: what it is a run of.
        label: what it is called.
    """

    def __init__(self, options: CompareOptions, key: RunKey, label: str) -> None:
        assert options.churn is not None
        self._options, self._key, self._label = options, key, label
        self._every = options.churn
        self.churn = Churn(options.churn, key.seed, self._all_have_begun)
        self._signs: list[MemberSign] = []
        self._shown = 0

    def heard(self, sign: MemberSign) -> Progress | None:
        """Take in a sign. Returns what to show of it: of the member that is furthest.

        When one has taken all steps nothing more happens to the others.
        """
        self._signs.append(sign)
        if sign.step >= sign.steps:
            self.churn.end()
        if sign.step < self._shown or sign.loss is None:
            return None
        self._shown = sign.step
        per_epoch = max(1, sign.steps // (self._options.epochs or 1))
        return Progress(
            algorithm=self._label,
            epoch=sign.step // per_epoch,
            step=sign.step,
            steps=sign.steps,
            seconds=sign.at - self._signs[0].at,
            loss=sign.loss,
            accuracy=sign.accuracy,
            mb=None if (sent := self._sent()) is None else sent / 1e6,
        )

    def records(self, result: Result, strategy: str) -> list[Record]:
        """The records of a run that has ended well."""
        options, key = self._options, self._key._asdict()
        ended = [each for each in self._signs if each.accuracy is not None]
        last, sent = ended[-1], self._sent()
        seconds = max(each.at for each in ended) - self._began
        accuracy = fmean(each.accuracy for each in ended if each.accuracy is not None)
        loss = fmean(each.loss for each in ended if each.loss is not None)
        reached = options.target is not None and accuracy >= options.target
        head = RunRecord(
            **key,
            strategy=strategy,
            recipe=options.recipe,
            cluster=options.common["cluster"],
            shaped=options.cluster.shaped,
            epochs=options.epochs,
            target=options.target,
            batch_per_rank=recipes.get(options.recipe, options.choices).batch,
            world_size=options.cluster.world_size,
            parameters=last.parameters,
            environment=Environment.here(),
            churn=self._every,
        )
        epoch = EpochRecord(
            **key,
            epoch=options.epochs or 1,
            step=last.step,
            seconds=seconds,
            loss=loss,
            accuracy=accuracy,
            bytes_between_nodes=sent,
        )
        end = EndRecord(
            **key,
            status="ok",
            seconds=seconds,
            steps=last.step,
            mb_between_nodes=None if sent is None else sent / 1e6,
            accuracy=accuracy,
            loss=loss,
            seconds_to_target=seconds if reached else None,
            validation=-loss,
            metrics=last.metrics,
            relay_cores=None if result.relayed is None else result.relayed.cores,
            relay_doubt=None if result.relayed is None else result.relayed.doubt,
        )
        return [head, epoch, self._churned(seconds), end]

    def _all_have_begun(self) -> bool:
        return len({each.node for each in self._signs}) == self._options.cluster.nodes

    @property
    def _began(self) -> float:
        """When the last replica had begun for the first time."""
        first: dict[int, float] = {}
        for each in self._signs:
            first.setdefault(each.node, each.at)
        return max(first.values())

    def _sent(self) -> int | None:
        """Bytes that all nodes have sent since their first sign; None where they have no interfaces."""
        counts: dict[int, list[int]] = defaultdict(list)
        for each in self._signs:
            if each.sent is not None:
                counts[each.node].append(each.sent)
        return sum(max(each) - min(each) for each in counts.values()) if counts else None

    def _churned(self, seconds: float) -> ChurnRecord:
        began, signs = self._began, sorted(self._signs, key=lambda each: each.at)
        starts: dict[tuple[int, int], list[MemberSign]] = defaultdict(list)
        members: list[list[float]] = []
        period = 0
        rounds: list[list[float]] = []
        for each in signs:
            starts[each.node, each.process].append(each)
            if each.period > period:
                period = each.period
                members.append([round(max(0.0, each.at - began), 2), each.members])
            if not rounds or each.round > rounds[-1][1]:
                rounds.append([round(max(0.0, each.at - began), 2), each.round])
        return ChurnRecord(
            **self._key._asdict(),
            went=[[round(each.at - began, 2), each.node, each.what] for each in self.churn.events],
            members=members,
            rounds=rounds,
            samples=_rates([*starts.values()], began, seconds),
            useful=sum(max(each.useful for each in start) for start in starts.values()),
            up=sum(self._up(start) for start in starts.values()),
        )

    def _up(self, start: Sequence[MemberSign]) -> float:
        """Seconds from a process' first sign until it was killed, or its last sign, without those frozen."""
        up, since = 0.0, start[0].at
        for each in [each for each in self.churn.events if each.node == start[0].node and each.at > since]:
            up += each.at - since if each.what != "back" else 0.0
            since = each.at
            if each.what == "killed":
                return up
        return up + max(0.0, start[-1].at - since)


def _rates(starts: Sequence[Sequence[MemberSign]], began: float, seconds: float) -> list[list[float]]:
    """How many samples a second all have trained on, piece by piece."""
    pieces = max(1, min(_PIECES, int(seconds)))
    marks = [seconds * i / pieces for i in range(pieces + 1)]
    counts = [sum(_by(start, began + mark) for start in starts) for mark in marks]
    width = seconds / pieces
    return [
        [round(mark, 2), round((after - before) / width, 1)]
        for mark, (before, after) in zip(marks[1:], pairwise(counts), strict=True)
    ]


def _by(start: Sequence[MemberSign], at: float) -> float:
    """Samples that a process had trained on by then, between two signs as by a steady rate."""
    done = 0.0
    for before, after in pairwise(start):
        if at >= after.at:
            done = after.samples
        elif at > before.at:
            share = (at - before.at) / (after.at - before.at)
            return before.samples + share * (after.samples - before.samples)
    return done
