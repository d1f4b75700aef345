"""What is written down of a simulated training: its timeline, and what training waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tacit.contracts import NET, NODE
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Activity, Clock, Network
from tacit.planning.simulation.rehearsal import NodeMessage

__all__ = ["ENCODING", "MAIN", "WAITING", "ClockTimeline", "Simulated", "SimulatedSpan"]

ENCODING = "encoding"
"""The row of the lane; and what training waits for where nothing is on a link."""
MAIN, WAITING = "training", "waiting"
"""The row of the thread that trains, and what it does there while an exchange is not over."""


class SimulatedSpan(NamedTuple):
    """Something on the timeline: in which row, what, from when until when, in seconds."""

    row: str
    what: str
    begun: float
    ended: float


@dataclass
class Simulated:
    """What a number of steps took.

    Attributes:
        steps: how many; `seconds`: all of them.
        exposed: seconds that training waited, by what it waited for: NET, NODE or ENCODING.
        crossing: bytes that left the busiest node.
        spans: the timeline of these steps.
    """

    steps: int
    seconds: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    crossing: int = 0
    spans: list[SimulatedSpan] = field(default_factory=list)

    def sent(self, crossing: int) -> None:
        """So many bytes leave the node."""
        self.crossing += crossing

    def ended(self, seconds: float) -> None:
        """It has taken so long; find what training waited for."""
        self.seconds = seconds
        links = {axis: _united(self.spans, axis) for axis in (NET, NODE)}
        for span in self.spans:
            left = [(span.begun, span.ended)] if span.what == WAITING else []
            for axis, busy in links.items():
                self.exposed[axis] += _length(_common(left, busy))
                left = _without(left, busy)
            self.exposed[ENCODING] += _length(left)


class ClockTimeline:
    """The clock, and what is written down of what happens by it."""

    def __init__(self, profile: Profile, network: Network) -> None:
        self.profile, self.network = profile, network
        self.clock = Clock(network.cores / network.sharing)
        self.result = Simulated(0)
        self._begun = 0.0

    def begin(self, steps: int) -> None:
        """Write down from now on."""
        self.result, self._begun = Simulated(steps), self.clock.now

    def end(self) -> Simulated:
        """What was written down."""
        self.result.ended(self.clock.now - self._begun)
        return self.result

    def note(self, row: str, what: str, begun: float) -> None:
        """It has lasted from then until now."""
        begun = max(begun, self._begun)
        if self.clock.now > begun:
            self.result.spans.append(
                SimulatedSpan(row, what, begun - self._begun, self.clock.now - self._begun)
            )

    def compute(self, what: str, seconds: float, row: str = MAIN) -> Generator[Activity, None, None]:
        """Work of the main thread, for which torch may use several."""
        if seconds > 0:
            begun, threads = self.clock.now, self.profile.threads if row == MAIN else 1
            yield self.clock.work(seconds * threads, threads)
            self.note(row, what, begun)

    def send_message(self, message: NodeMessage, what: str) -> Activity:
        """A collective of an exchange."""
        own = message.own
        return self.send(own.kind, own.axis, own.sent, message.crossing, what, message.by_node)

    def send(
        self, kind: str, axis: str, sent: int, crossing: int, what: str, by_node: Sequence[int] = ()
    ) -> Activity:
        """A collective; see `Network.transfer`."""
        transfer = self.network.transfer(kind, axis, sent, crossing, by_node)
        begun = self.clock.now
        activity = self.clock.send(transfer)
        activity.then(lambda: self.note(transfer.link, what, begun))
        self.result.sent(crossing)
        return activity


# ---- spans of time --------------------------------------------------------------------------------------

_Times = list[tuple[float, float]]


def _united(spans: Iterable[SimulatedSpan], row: str) -> _Times:
    """The times in which something is in a row, in order, without overlaps."""
    found: _Times = []
    for begun, ended in sorted((each.begun, each.ended) for each in spans if each.row == row):
        if found and begun <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((begun, ended))
    return found


def _common(some: _Times, others: _Times) -> _Times:
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) < min(b, d)]


def _without(some: _Times, others: _Times) -> _Times:
    left = some
    for c, d in others:
        left = [part for a, b in left for part in ((a, min(b, c)), (max(a, d), b)) if part[0] < part[1]]
    return left


def _length(times: _Times) -> float:
    return sum(b - a for a, b in times)
