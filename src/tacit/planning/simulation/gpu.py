"""A simulated rank with a GPU: the host launches, the streams run in order, and copies take their own way.

Kernels of both streams share the GPU equally while they run at the same time. The host is ahead of the GPU by
a step at most. The GPU's waiting, not the host's, is what training waits for an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from tacit.planning.profile import GpuProfile, Launching, Profile
from tacit.planning.simulation.clock import Activity, Network, Transfer
from tacit.planning.simulation.lane import ClockJob, ClockLane
from tacit.planning.simulation.timeline import ENCODING, MAIN, WAITING, ClockTimeline

_GPU, _DOWN, _UP = "gpu", "copies to the host", "copies to the GPU"


class GpuStream:
    """What runs on a GPU one after another, in the order in which the host launches it.

    Attributes:
        last: what was launched last.
        dry: when the stream last ran out of work.
    """

    def __init__(self, timeline: GpuTimeline, row: str) -> None:
        self._timeline, self._row = timeline, row
        self.last = Activity("stream", 0.0, done=True)
        self.dry = 0.0

    def put(self, begin: Callable[[], Activity]) -> None:
        """Begin something when all before it has ended."""
        over = Activity("stream", 0.0)
        self.last.then(lambda: begin().then(over.end))
        self.last = over
        over.then(self._ran)

    def _ran(self) -> None:
        self.dry = self._timeline.clock.now

    def run(self, what: str, seconds: float) -> None:
        """Run kernels that take so long if they have the GPU to themselves."""
        if seconds > 0:
            self.put(lambda: self._timeline.carry(_GPU, seconds, 1.0, self._row, what))


class GpuTimeline(ClockTimeline):
    """The simulated clock of a host and its GPU, with a record of their activities."""

    def __init__(self, profile: Profile, network: Network, gpu: GpuProfile) -> None:
        super().__init__(profile, network)
        self.gpu = gpu
        self.stream, self.exchanges = GpuStream(self, MAIN), GpuStream(self, ENCODING)
        self._before = self.stream.last
        step = profile.step
        self._launching = {
            part: getattr(gpu.launching, part) / getattr(step, part)
            for part in Launching.PARTS
            if getattr(step, part) > 0
        }

    def carry(self, link: str, amount: float, rate: float, row: str, what: str) -> Activity:
        """Use the GPU, or a way of copies, which all activities on it share."""
        begun = self.clock.now
        found = self.clock.send(Transfer(link, amount, rate, 0.0, 0.0))
        found.then(lambda: self.note(row, what, begun))
        return found

    def compute(self, what: str, seconds: float, row: str = MAIN) -> Generator[Activity, None, None]:
        """Simulate work of the thread that trains: the host launches it, and the GPU runs it.

        What a round of deltas takes is of both in turns.
        """
        if row != MAIN:
            yield from super().compute(what, seconds, row)
        elif what == "data":
            yield from self.idle(what, seconds)
        elif seconds > 0:
            self.stream.run(what, seconds)
            yield self.clock.rest(seconds * self._launching.get(what, 1.0))

    def idle(self, what: str, seconds: float) -> Generator[Activity, None, None]:
        """Leave the GPU without work: by its events it has none between two steps, whatever the host does."""
        if seconds > 0:
            self.stream.put(lambda: self._rested(what, seconds))
            yield self.clock.rest(seconds)

    def _rested(self, what: str, seconds: float) -> Activity:
        begun, found = self.clock.now, self.clock.rest(seconds)
        found.then(lambda: self.note(MAIN, what, begun))
        return found

    def wait(self, end: Activity, by_host: bool = True) -> Generator[Activity, None, None]:
        """Wait for an exchange: the host does, or the stream alone, as with plain DDP."""
        if by_host:
            begun = self.clock.now
            yield end
            if self.stream.last.done:
                self.note(MAIN, WAITING, max(begun, self.stream.dry))
        else:
            self.stream.put(partial(self._waited, end))

    def _waited(self, end: Activity) -> Activity:
        begun = self.clock.now
        end.then(lambda: self.note(MAIN, WAITING, begun))
        return end

    def step_ended(self) -> Generator[Activity, None, None]:
        """Keep the host from being more than a step ahead."""
        before, self._before = self._before, self.stream.last
        yield before

    def drained(self) -> Generator[Activity, None, None]:
        """Wait until the GPU has run all that was launched."""
        yield self.stream.last


class StreamedLane(ClockLane):
    """Launches each exchange as a whole on the stream of exchanges, as `exchange.stream_lane` does."""

    _timeline: GpuTimeline

    def submit(self, job: ClockJob, inline: bool) -> Generator[Activity, None, None]:
        """Launch an exchange, which begins when what was launched for training has run."""
        timeline = self._timeline
        if job.launching:
            yield timeline.clock.rest(job.launching)
        stream, before = timeline.exchanges, timeline.stream.last
        stream.put(lambda: before)
        stream.run("encode", job.segments[0])
        for message, segment in zip(job.script.messages, job.segments[1:], strict=True):
            stream.put(partial(timeline.send_message, message, job.script.names[0], by_nccl=True))
            stream.run("decode", segment)
        stream.last.then(job.over.end)


class CopyingLane(ClockLane):
    """Copies each bucket to the host, where the lane exchanges it, and its answer back."""

    _timeline: GpuTimeline

    def submit(self, job: ClockJob, inline: bool) -> Generator[Activity, None, None]:
        """Put an exchange at the end, once its bucket is there."""
        timeline, gpu = self._timeline, self._timeline.gpu
        element = timeline.profile.named[job.script.names[0]].element_size()
        nbytes, exchanged = float(job.script.numel * element), Activity("exchange", 0.0)
        mine = replace(job, over=exchanged)
        self._under_way.append(mine)
        copied = partial(timeline.carry, row="copies", what=job.script.names[0])
        timeline.stream.last.then(lambda: copied(_DOWN, nbytes, gpu.down).then(lambda: self._happened(mine)))
        exchanged.then(lambda: copied(_UP, nbytes, gpu.up).then(job.over.end))
        yield from ()
