"""The record of a simulated training: its timeline, and what training waited for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tacit.contracts import NET, NODE
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Activity, Clock, Network
from tacit.planning.simulation.rehearsal import NodeMessage

ENCODING = "encoding"
"""The row of the lane; and what training waits for when no link is in use."""
MAIN, WAITING = "training", "waiting"
"""The row of the training thread, and its activity while it waits for an exchange."""


class SimulatedSpan(NamedTuple):
    """An activity on the timeline: its row, its name, and its begin and end in seconds."""

    row: str
    what: str
    begun: float
    ended: float


@dataclass
class Simulated:
    """The times of a number of simulated steps.

    Attributes:
        steps: the number of steps.
        seconds: the seconds of all steps.
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
        """Add bytes that leave the node."""
        self.crossing += crossing

    def ended(self, seconds: float) -> None:
        """End after these seconds, and compute what training waited for."""
        self.seconds = seconds
        links = {axis: _united(self.spans, axis) for axis in (NET, NODE)}
        for span in self.spans:
            left = [(span.begun, span.ended)] if span.what == WAITING else []
            for axis, busy in links.items():
                self.exposed[axis] += _length(_common(left, busy))
                left = _without(left, busy)
            self.exposed[ENCODING] += _length(left)


class ClockTimeline:
    """The simulated clock, with a record of its activities."""

    def __init__(self, profile: Profile, network: Network) -> None:
        self.profile, self.network = profile, network
        self.clock = Clock(network.cores / network.sharing)
        self.result = Simulated(0)
        self._begun = 0.0
        self._used: dict[tuple[str, str], float] = {}
        """When a message of this kind last ended on an axis; each kind has connections of its own."""

    def begin(self, steps: int) -> None:
        """Begin to record."""
        self.result, self._begun = Simulated(steps), self.clock.now

    def end(self) -> Simulated:
        """End, and return the record."""
        self.result.ended(self.clock.now - self._begun)
        return self.result

    def note(self, row: str, what: str, begun: float) -> None:
        """Record an activity from `begun` until now."""
        begun = max(begun, self._begun)
        if self.clock.now > begun:
            self.result.spans.append(
                SimulatedSpan(row, what, begun - self._begun, self.clock.now - self._begun)
            )

    def compute(self, what: str, seconds: float, row: str = MAIN) -> Generator[Activity, None, None]:
        """Simulate work of the main thread, for which torch may use several threads."""
        if seconds > 0:
            begun, threads = self.clock.now, self.profile.threads if row == MAIN else 1
            yield self.clock.work(seconds * threads, threads)
            self.note(row, what, begun)

    def idle(self, what: str, seconds: float) -> Generator[Activity, None, None]:
        """Wait for what is neither computing nor an exchange."""
        if seconds > 0:
            yield self.clock.rest(seconds)

    def wait(self, end: Activity, by_host: bool = True) -> Generator[Activity, None, None]:
        """Wait for an exchange; `by_host`: whether a GPU's host does, too."""
        begun = self.clock.now
        yield end
        self.note(MAIN, WAITING, begun)

    def step_ended(self) -> Generator[Activity, None, None]:
        """Go on to the next step."""
        yield from ()

    def drained(self) -> Generator[Activity, None, None]:
        """Wait until all computing has ended; a processor's has."""
        yield from ()

    def send_message(self, message: NodeMessage, what: str, by_nccl: bool = False) -> Activity:
        """Simulate a collective of an exchange."""
        own = message.own
        return self.send(own.kind, own.axis, own.sent, message.crossing, what, message.by_node, by_nccl)

    def send(
        self,
        kind: str,
        axis: str,
        sent: int,
        crossing: int,
        what: str,
        by_node: Sequence[int] = (),
        by_nccl: bool = False,
    ) -> Activity:
        """Simulate a collective; see `Network.transfer`."""
        network, begun = self.network, self.clock.now
        transfer = network.transfer(kind, axis, sent, crossing, by_node, by_nccl)
        if not by_nccl:
            silence = begun - self._used.get((kind, axis), -math.inf)
            transfer = network.resumed(kind, axis, transfer, sent, silence)
        activity = self.clock.send(transfer)
        activity.then(lambda: self._used.update({(kind, axis): self.clock.now}))
        activity.then(lambda: self.note(transfer.link, what, begun))
        self.result.sent(crossing)
        return activity


# ---- spans of time --------------------------------------------------------------------------------------

_Times = list[tuple[float, float]]


def _united(spans: Iterable[SimulatedSpan], row: str) -> _Times:
    """The times in which a row has an activity, in order, without overlaps."""
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
