"""Where the time of a training's steps goes, by what all its ranks have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import ClassVar

from tacit.described import Saved
from tacit.links import Links

__all__ = ["PARTS", "Diagnosis", "Facts", "Finding", "RankSteps", "Shares", "in_ms", "shares", "typical"]

PARTS = ("computing", "data", "slow rank", "encoding", "links")
"""What a step is made of; see `Shares`."""
_WORDS = {
    "computing": "computing",
    "data": "data, and what else the script does",
    "slow rank": "waiting for the slowest rank",
    "encoding": "waiting for encoding and decoding",
    "links": "waiting for links",
}
_BAR = 30


@dataclass(frozen=True)
class RankSteps(Saved):
    """The same steps of one rank, in seconds by the clock, one entry a step.

    Attributes:
        rank: in the world; `node`: its node's number; `machine`: equal for all ranks of one machine.
        wall: the whole step.
        data: from the optimizer's step before until the last forward pass.
        exposed: waiting for an exchange.
        parts: medians of what the rank's own work is made of: "loading" (it waits for a loader), "data"
            (it works between steps), "forward", "backward", "optimizer".
        threads: for computing; `cores`: of the machine.
        passes: forward passes in a step.
        sent: bytes a step that the busiest interface of its node has sent.
        interface: that one; `rate`: bit/s that it says it carries.
        faster: another one of the node that says it carries more; `faster_rate`: how much.
        buffer: bytes that a TCP connection may have under way.
        congestion_control: what new TCP connections go by, such as "cubic"; "" where the kernel does not say.
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
    passes: int = 1
    sent: float = 0.0
    interface: str = ""
    rate: float | None = None
    faster: str = ""
    faster_rate: float | None = None
    buffer: int | None = None
    congestion_control: str = ""

    @property
    def own(self) -> tuple[float, ...]:
        """What the rank does by itself in each step: all but waiting for exchanges."""
        return tuple(wall - exposed for wall, exposed in zip(self.wall, self.exposed, strict=True))


@dataclass(frozen=True)
class Facts:
    """All that is known of some steps of a training.

    Attributes:
        algorithm: the text of the strategy at work.
        period: after how many steps its rounds repeat.
        ranks: in order.
        links: what the links carry; None where they were not measured.
        searched: whether DDP looks for unused parameters (`find_unused_parameters`); `unused`: those that it
            had reason to look for.
        copying: seconds a step for copying gradients into DDP's buckets and back; 0 where they are views.
        buckets: how many messages a round is cut into; `bucket_bytes`: at most of one.
        predicted: seconds of a step with the strategy at work, as the planner has it; None where it cannot.
        waits: of these, the planner's seconds of waiting for "encoding" and for "links".
        changes: by name, the planner's seconds of a step with this change.
        threads_gain: the share of computing that one thread a rank would save, as measured.
        best: the text of the strategy that the planner finds fastest; its seconds are among the changes.
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
    best: str = ""

    @property
    def seconds(self) -> float:
        """Of a step, on average over the ranks and the steps of whole periods."""
        return fmean(fmean(each) for row in _by_period([e.wall for e in self.ranks], self) for each in row)

    @property
    def own(self) -> list[list[float]]:
        """Seconds of each rank's own work a step, on average over a period; a row a period."""
        return [[fmean(own) for own in row] for row in _by_period([each.own for each in self.ranks], self)]

    def saved(self, change: str) -> float:
        """Seconds a step that a change would save, by the planner's ratio."""
        if change not in self.changes or not self.predicted:
            return 0.0
        return self.seconds * max(0.0, 1 - self.changes[change] / self.predicted)


@dataclass(frozen=True)
class Shares:
    """A step taken apart, in seconds, on average over its ranks.

    Attributes:
        parts: by the names of `PARTS`; together they are the step.
        limit: of a step if communication cost nothing: that of the slowest rank, step by step.
    """

    parts: Mapping[str, float]
    limit: float


@dataclass(frozen=True)
class Finding:
    """Something that costs time, and what to do about it.

    Attributes:
        kind: its name, such as "slow rank".
        says: what was found, with numbers.
        advice: what to change.
        seconds: of a step that the change would save; 0 where nobody can tell.
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
        steps: how many were looked at.
        ranks: of the training.
        seconds: of a step.
        parts: the step taken apart; see `Shares`.
        limit: seconds of a step if communication cost nothing.
        findings: what costs time, the most first.
        traffic: what the links carry, in a sentence; "" where nothing is known.
        notes: what could not be looked at.
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

    def __str__(self) -> str:
        """A table of the parts, and what was found."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        lines = [
            f"{self.algorithm} on {ranks}: a step takes {in_ms(self.seconds)}, the mean of {self.steps}",
            "",
        ]
        for name in PARTS:
            share = self.parts[name] / self.seconds
            bar = "#" * round(_BAR * share)
            lines.append(f"  {_WORDS[name]:36}{in_ms(self.parts[name]):>12}{100 * share:6.0f} %  {bar}")
        lines += [
            "",
            f"If communication cost nothing, a step would take {in_ms(self.limit)}.",
            *([self.traffic] if self.traffic else []),
            "",
            *self._told(),
            *(f"Not looked at: {note}." for note in self.notes),
        ]
        return "\n".join(lines)

    def _told(self) -> list[str]:
        if not self.findings:
            return ["Nothing stands out."]
        lines = ["What costs time, the most first:"]
        for number, each in enumerate(self.findings, 1):
            saves = f", about {in_ms(each.seconds)} of a step" if each.seconds else ""
            lines += [f"{number}. {each.kind}{saves}: {each.says}", f"   Change: {each.advice}"]
        return lines


def shares(facts: Facts) -> Shares:
    """Take the steps apart.

    Ranks that exchange wait for each other: of what a rank waits, as much as the slowest one's own work takes
    longer than its own is waiting for that rank. The rest is the exchange's, by the planner's ratio of
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
    return Shares(parts, fmean(max(row) for row in own))


def _by_period(columns: Sequence[Sequence[float]], facts: Facts) -> list[list[Sequence[float]]]:
    """A row for each whole period: the steps of each rank in it."""
    steps = min(map(len, columns))
    period = min(facts.period, steps)
    return [
        [column[first : first + period] for column in columns]
        for first in range(steps % period, steps, period)
    ]


def typical(facts: Facts, part: str) -> float:
    """The median over ranks of a part of their own work; of two ranks the smaller."""
    return median_low(each.parts.get(part, 0.0) for each in facts.ranks)


def in_ms(seconds: float) -> str:
    """As text, in milliseconds."""
    return f"{1e3 * seconds:.1f} ms"
