"""Where the time of a training's steps goes, by the measurements of all its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import ClassVar

from tacit.described import Saved
from tacit.links import Links
from tacit.planning.profile import GpuProfile

PARTS = ("computing", "data", "slow rank", "encoding", "links")
"""The parts of a step; see `Shares`."""
_WORDS = {
    "computing": "computing",
    "data": "data, and what else the script does",
    "slow rank": "waiting for the slowest rank",
    "encoding": "waiting for encoding and decoding",
    "links": "waiting for links",
}
ACCUMULATING = "passes before the last, and data"
"""What "data" is with accumulation."""
_BAR = 30


@dataclass(frozen=True)
class RankSteps(Saved):
    """The measured steps of one rank, in seconds of wall-clock time, one entry a step.

    Attributes:
        rank: in the world.
        node: its node's number.
        machine: equal for all ranks of one machine.
        wall: the whole step.
        data: from the optimizer's step before until the last forward pass.
        exposed: waiting for an exchange.
        parts: the medians of the parts of the rank's work: "loading" (it waits for a loader), "data" (it
            works between steps), "forward", "backward", "optimizer".
        threads: the number of the processor's threads that compute; 1 if a GPU does.
        cores: the number of cores of the machine.
        gpu: the name of the GPU that computes; "": the processor does.
        launching: the host's seconds of a forward pass that a GPU computes.
        queued: the GPU's seconds of both passes where the host had launched them before; 0: not measured.
        passes: the number of forward passes in a step.
        sent: the bytes a step that the busiest interface of its node has sent.
        interface: the name of that interface.
        rate: its reported speed in bit/s.
        faster: the name of a faster interface of the node; "": there is none.
        faster_rate: its reported speed in bit/s.
        idle: the names of other devices that say as much, and carry next to nothing.
        resent: the share of its node's segments of TCP that were sent again, as they were lost on the way.
        congestion_control: that of new TCP connections, such as "cubic"; "": the kernel does not report it.
    """

    what: ClassVar[str] = "steps of a rank"

    rank: int
    node: int
    host: str
    machine: str
    wall: tuple[float, ...]
    data: tuple[float, ...]
    exposed: tuple[float, ...]
    parts: Mapping[str, float]
    threads: int
    cores: int
    gpu: str = ""
    launching: float = 0.0
    queued: float = 0.0
    passes: int = 1
    sent: float = 0.0
    interface: str = ""
    rate: float | None = None
    faster: str = ""
    faster_rate: float | None = None
    idle: tuple[str, ...] = ()
    resent: float = 0.0
    congestion_control: str = ""

    @property
    def own(self) -> tuple[float, ...]:
        """The seconds of the rank's work in each step: all but waiting for exchanges."""
        return tuple(wall - exposed for wall, exposed in zip(self.wall, self.exposed, strict=True))


@dataclass(frozen=True)
class Facts:
    """The facts about some steps of a training.

    Attributes:
        algorithm: the text of the strategy at work.
        period: after how many steps its rounds repeat.
        ranks: in order.
        links: the measured links; None: they were not measured.
        searched: whether DDP searches for unused parameters (`find_unused_parameters`).
        unused: how many parameters had no gradient.
        copying: seconds a step for copying gradients into DDP's buckets and back; 0 if they are views.
        buckets: the number of messages of a round.
        bucket_bytes: the most bytes of one of them.
        predicted: the planner's seconds of a step with the strategy at work; None: it cannot predict them.
        waits: of these, the planner's seconds of waiting for "encoding" and for "links".
        changes: by name, the planner's seconds of a step with this change.
        threads_gain: the share of computing that one thread a rank would save, as measured.
        gpu: the GPU that computes, and its links; None: a processor computes.
        connections: how many two ranks have, in Gloo; `sockets`: in NCCL, by its environment variables.
        alone: the planner's seconds of a step if communication cost nothing; None: as measured with the
            strategy at work, whose encoding may be in the way of computing.
        best: the text of the strategy that the planner predicts to be fastest; its seconds are in `changes`.
    """

    algorithm: str
    period: int
    ranks: tuple[RankSteps, ...]
    links: Links | None = None
    searched: bool = False
    unused: int = 0
    copying: float = 0.0
    buckets: int = 0
    bucket_bytes: int = 0
    predicted: float | None = None
    waits: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, float] = field(default_factory=dict)
    threads_gain: float = 0.0
    gpu: GpuProfile | None = None
    connections: int = 1
    sockets: int = 1
    alone: float | None = None
    best: str = ""

    @property
    def seconds(self) -> float:
        """The seconds of a step, averaged over the ranks and the steps of whole periods."""
        return fmean(fmean(each) for row in _by_period([e.wall for e in self.ranks], self) for each in row)

    @property
    def own(self) -> list[list[float]]:
        """Seconds of each rank's work in a step, averaged over a period; one row a period."""
        return [[fmean(own) for own in row] for row in _by_period([each.own for each in self.ranks], self)]

    def saved(self, change: str) -> float:
        """Seconds a step that a change would save, by the planner's ratio."""
        if change not in self.changes or not self.predicted:
            return 0.0
        return self.seconds * max(0.0, 1 - self.changes[change] / self.predicted)


@dataclass(frozen=True)
class Shares:
    """The parts of a step, in seconds, averaged over its ranks.

    Attributes:
        parts: by the names of `PARTS`; together they are the step.
        limit: the seconds of a step if communication cost nothing: all but waiting for encoding and links.
    """

    parts: Mapping[str, float]
    limit: float


@dataclass(frozen=True)
class Finding:
    """Something that costs time, and what to do about it.

    Attributes:
        kind: its name, such as "slow rank".
        says: the finding in a sentence, with numbers.
        advice: what to change.
        seconds: the seconds of a step that the change would save; 0: unknown.
    """

    kind: str
    says: str
    advice: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Diagnosis(Saved):
    """Where a step's time goes, and why.

    Attributes:
        algorithm: the text of the strategy that was at work.
        steps: the number of measured steps.
        ranks: of the training.
        seconds: of a step.
        parts: the parts of a step; see `Shares`.
        limit: seconds of a step if communication cost nothing.
        findings: what costs time, the most first.
        traffic: a sentence on what the links carry; "": unknown.
        notes: what could not be measured.
        passes: the number of forward passes in a step: with accumulation all but the last are in "data".
    """

    what: ClassVar[str] = "diagnosis"
    made_by: ClassVar[str] = "tacit diagnose"

    algorithm: str
    steps: int
    ranks: int
    seconds: float
    parts: Mapping[str, float]
    limit: float
    findings: tuple[Finding, ...]
    traffic: str = ""
    notes: tuple[str, ...] = ()
    passes: int = 1

    def __str__(self) -> str:
        """A table of the parts, and the findings."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        told = f"the mean of {self.steps}" if self.steps > 1 else "as predicted"
        lines = [f"{self.algorithm} on {ranks}: a step takes {in_ms(self.seconds)}, {told}", ""]
        for name in PARTS:
            share = self.parts[name] / self.seconds
            bar = "#" * round(_BAR * share)
            words = ACCUMULATING if name == "data" and self.passes > 1 else _WORDS[name]
            lines.append(f"  {words:36}{in_ms(self.parts[name]):>12}{100 * share:6.0f} %  {bar}".rstrip())
        lines += [
            "",
            f"If communication cost nothing, a step would take {in_ms(self.limit)}.",
            *([self.traffic] if self.traffic else []),
            "",
            *self._finding_lines(),
            *(f"Not measured: {note}." for note in self.notes),
        ]
        return "\n".join(lines)

    def _finding_lines(self) -> list[str]:
        if not self.findings:
            return ["Nothing stands out."]
        overlap = " (they overlap: savings do not add up)" if len(self.findings) > 1 else ""
        lines = [f"What costs time, the most first{overlap}:"]
        for number, each in enumerate(self.findings, 1):
            saves = f", about {in_ms(each.seconds)} of a step" if each.seconds else ""
            lines += [f"{number}. {each.kind}{saves}: {each.says}", f"   Change: {each.advice}"]
        return lines


def shares(facts: Facts) -> Shares:
    """Divide the steps into parts.

    Ranks that exchange wait for each other. Of a rank's waiting, the difference of the slowest rank's work to
    its work is waiting for that rank. The rest belongs to the exchange, divided by the planner's ratio of
    encoding to links.
    """
    own = facts.own
    exposed = [[fmean(each) for each in row] for row in _by_period([e.exposed for e in facts.ranks], facts)]
    for_rank = rest = 0.0
    for mine, waits in zip(own, exposed, strict=True):
        for seconds, waited in zip(mine, waits, strict=True):
            behind = min(waited, max(mine) - seconds)
            for_rank += behind
            rest += waited - behind
    count = len(own) * len(facts.ranks)
    data = fmean(fmean(each) for row in _by_period([e.data for e in facts.ranks], facts) for each in row)
    encoding = facts.waits.get("encoding", 0.0)
    total = encoding + facts.waits.get("links", 0.0)
    rest /= count
    parts = {
        "computing": max(0.0, fmean(map(fmean, own)) - data),
        "data": data,
        "slow rank": for_rank / count,
        "encoding": rest * (encoding / total if total else 0.0),
        "links": rest * (1 - encoding / total if total else 1.0),
    }
    return Shares(parts, facts.seconds - rest if facts.alone is None else facts.alone)


def _by_period(columns: Sequence[Sequence[float]], facts: Facts) -> list[list[Sequence[float]]]:
    """One row for each whole period: the steps of each rank in it."""
    steps = min(map(len, columns))
    period = min(facts.period, steps)
    return [
        [column[first : first + period] for column in columns]
        for first in range(steps % period, steps, period)
    ]


def typical(facts: Facts, part: str) -> float:
    """The median over ranks of a part of their work; of two ranks the smaller."""
    return median_low(each.parts.get(part, 0.0) for each in facts.ranks)


def in_ms(seconds: float) -> str:
    """Seconds as a text in milliseconds."""
    return f"{1e3 * seconds:.1f} ms"
