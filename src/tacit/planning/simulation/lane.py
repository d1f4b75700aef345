"""The simulated lane of exchanges."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from tacit.contracts import staged_on
from tacit.exchange.lane import in_turn
from tacit.planning.simulation.clock import Activity
from tacit.planning.simulation.rehearsal import BucketScript, NodeMessage
from tacit.planning.simulation.timeline import ENCODING, ClockTimeline


@dataclass(eq=False)
class ClockJob:
    """One exchange in the simulated lane; see `exchange.lane.Job`.

    Attributes:
        launching: the host's seconds, where a GPU runs it.
    """

    script: BucketScript
    segments: Sequence[float]
    over: Activity
    launching: float = 0.0
    next: int = 0
    waits: bool = False
    stages: Counter[str] = field(default_factory=Counter)

    @property
    def message(self) -> NodeMessage:
        """The message that it posts next, or has posted."""
        return self.script.messages[self.next - 1]

    @property
    def where(self) -> str:
        """The name under which its stage is counted; see `contracts.compressor.staged_on`."""
        return staged_on(self.message.own.kind, self.message.own.axis)

    def advance(self) -> bool:
        """End a segment. Returns whether a message follows it."""
        self.next += 1
        self.waits = self.next <= len(self.script.messages)
        return self.waits

    def post(self) -> None:
        """Post its message."""
        self.waits = False
        self.stages[self.where] += 1


class ClockLane:
    """Runs exchanges as `exchange.lane.Lane` does, in simulated time."""

    def __init__(self, timeline: ClockTimeline) -> None:
        self._timeline, self._busy = timeline, False
        self._events: deque[ClockJob] = deque()
        self._under_way: list[ClockJob] = []

    def submit(self, job: ClockJob, inline: bool) -> Generator[Activity, None, None]:
        """Put an exchange at the end; an inline one is started by the thread that submits it."""
        self._under_way.append(job)
        if inline:
            yield from self._timeline.compute("encode", job.segments[0])
            self._advanced(job)
        else:
            self._happened(job)

    def _happened(self, job: ClockJob) -> None:
        self._events.append(job)
        if not self._busy:
            self._busy = True
            self._timeline.clock.spawn(self._work())

    def _work(self) -> Generator[Activity, None, None]:
        while self._events:
            job = self._events.popleft()
            what = "encode" if job.next == 0 else "decode"
            yield from self._timeline.compute(what, job.segments[job.next], ENCODING)
            self._advanced(job)
        self._busy = False

    def _advanced(self, job: ClockJob) -> None:
        """End a segment: post its message, and those that were held for it."""
        if not job.advance():
            self._under_way.remove(job)
            job.over.end()
        for held in [each for each in self._under_way if each.waits]:
            if in_turn(held, held.where, self._under_way):
                self._post(held)

    def _post(self, job: ClockJob) -> None:
        job.post()
        sent = self._timeline.send_message(job.message, job.script.names[0])
        sent.then(lambda: self._happened(job))
