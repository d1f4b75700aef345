"""Steps of a training by the clock: computing, the lane's exchanges, and what training waits for."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tacit.contracts import NET, NODE, LateOverlap, PeriodicRounds
from tacit.exchange.lane import in_turn
from tacit.foresight.costs import CostOf
from tacit.foresight.profile import Profile
from tacit.foresight.rehearsal import TRAINING, BucketScript, LevelScript, NodeMessage, Rehearsal
from tacit.session.schedule import Schedule
from tacit.transports.clock import Activity, Clock, Network

__all__ = ["ENCODING", "MAIN", "Simulated", "SimulatedSpan", "simulate"]

ENCODING = "encoding"
"""The row of the lane; and what training waits for where nothing is on a link."""
MAIN, WAITING = "training", "waiting"
"""The row of the thread that trains, and what it does there while an exchange is not over."""
_FEWEST = 8
"""At least so many steps are simulated, and again as many before, which do not count."""


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


@dataclass(eq=False)
class _Job:
    """One exchange in the lane; see `exchange.lane.Job`."""

    script: BucketScript
    segments: Sequence[float]
    over: Activity
    next: int = 0
    waits: bool = False
    stages: Counter[str] = field(default_factory=Counter)

    @property
    def message(self) -> NodeMessage:
        """What it posts next, or has posted."""
        return self.script.messages[self.next - 1]

    @property
    def axis(self) -> str:
        """Of that."""
        return self.message.own.axis

    def advance(self) -> bool:
        """A segment is done; whether a message follows it."""
        self.next += 1
        self.waits = self.next <= len(self.script.messages)
        return self.waits

    def post(self) -> None:
        """Its message leaves."""
        self.waits = False
        self.stages[self.axis] += 1


class _Way(NamedTuple):
    """A round under way: when it is applied, its buckets, and the end of each one's exchange."""

    apply_at: int
    buckets: Sequence[int]
    ends: Sequence[Activity]


@dataclass(eq=False)
class _Level:
    script: LevelScript
    cost: CostOf
    schedule: Schedule
    lane: _Lane
    under_way: list[_Way] = field(default_factory=list)


class _Timeline:
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

    def send(self, kind: str, axis: str, sent: int, crossing: int, what: str) -> Activity:
        """A collective."""
        transfer = self.network.transfer(kind, axis, sent, crossing)
        begun = self.clock.now
        activity = self.clock.send(transfer)
        activity.then(lambda: self.note(transfer.link, what, begun))
        self.result.sent(crossing)
        return activity


class _Lane:
    """Runs exchanges as `exchange.lane.Lane` does, by the clock."""

    def __init__(self, timeline: _Timeline) -> None:
        self._timeline, self._busy = timeline, False
        self._events: deque[_Job] = deque()
        self._under_way: list[_Job] = []

    def submit(self, job: _Job, inline: bool) -> Generator[Activity, None, None]:
        """Put an exchange at the end; an inline one is begun by the thread that submits it."""
        self._under_way.append(job)
        if inline:
            yield from self._timeline.compute("encode", job.segments[0])
            self._advanced(job)
        else:
            self._happened(job)

    def _happened(self, job: _Job) -> None:
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

    def _advanced(self, job: _Job) -> None:
        """A segment is done: post its message, and those that were held for it."""
        if not job.advance():
            self._under_way.remove(job)
            job.over.end()
        for held in [each for each in self._under_way if each.waits]:
            if in_turn(held, held.axis, self._under_way):
                self._post(held)

    def _post(self, job: _Job) -> None:
        job.post()
        message, crossing = job.message.own, job.message.crossing
        sent = self._timeline.send(message.kind, message.axis, message.sent, crossing, job.script.names[0])
        sent.then(lambda: self._happened(job))


class _Rank:
    """The rank that stands for all."""

    def __init__(
        self, rehearsal: Rehearsal, profile: Profile, costs: Sequence[CostOf], network: Network
    ) -> None:
        self._profile, self._timeline = profile, _Timeline(profile, network)
        schedules = [Schedule(script.strategy, TRAINING) for script in rehearsal.levels]
        for schedule in schedules[:-1]:
            schedule.follow(schedules[-1])
        self._levels = [
            _Level(script, cost, schedule, _Lane(self._timeline))
            for script, cost, schedule in zip(rehearsal.levels, costs, schedules, strict=True)
        ]

    def run(self, first: int, steps: int) -> Simulated:
        """Simulate twice as many steps from the first; the second half counts."""
        self._timeline.clock.run(self._steps(first, steps))
        return self._timeline.end()

    def _steps(self, first: int, steps: int) -> Generator[Activity, None, None]:
        for number in range(2 * steps):
            if number == steps:
                self._timeline.begin(steps)
            yield from self._step(first + number)

    def _step(self, step: int) -> Generator[Activity, None, None]:
        timed, near, timeline = self._profile.step, self._levels[0], self._timeline
        if timed.loading:
            yield timeline.clock.rest(timed.loading)
        yield from timeline.compute("data", timed.data - timed.loading)
        gradients = near.script.strategy.subject != "delta"
        if gradients and self._profile.buffers:
            yield from self._broadcast(self._profile.buffers)
        yield from timeline.compute("forward", timed.forward)
        late = isinstance(near.script.strategy.overlap, LateOverlap)
        if late and gradients:
            yield from self._settle(near)
        due = gradients and near.schedule.at(step) is not None
        yield from self._backward(near, due)
        if not late and gradients:
            yield from self._settle(near)
        yield from timeline.compute("optimizer", timed.optimizer)
        for level in self._levels:
            if level.script.strategy.subject == "delta":
                yield from self._deltas(level, step)

    # ---- gradients ------------------------------------------------------------------------------------

    def _backward(self, level: _Level, due: bool) -> Generator[Activity, None, None]:
        ready = {each.name: each.ready for each in self._profile.step.parameters}
        at = 0.0
        buckets = range(len(level.script.buckets)) if due else ()
        way = self._leaves(level, 0, buckets)
        for i, end in zip(way.buckets, way.ends, strict=True):
            until = max(at, *(ready[name] for name in level.script.buckets[i].names))
            yield from self._timeline.compute("backward", until - at)
            at = until
            yield from self._submit(level, i, end)
        yield from self._timeline.compute("backward", self._profile.step.backward - at)

    def _settle(self, level: _Level) -> Generator[Activity, None, None]:
        for way in level.under_way:
            for end in way.ends:
                yield from self._wait(end)
        level.under_way.clear()

    def _broadcast(self, size: int) -> Generator[Activity, None, None]:
        crossing = size if self._timeline.network.nodes > 1 else 0
        yield from self._wait(self._timeline.send("Broadcast", "", size, crossing, "buffers"))

    # ---- deltas ---------------------------------------------------------------------------------------

    def _deltas(self, level: _Level, step: int) -> Generator[Activity, None, None]:
        schedule, parts = level.schedule, level.script.strategy.parts
        due = {part: sync for part in range(parts) if (sync := schedule.at(step, part)) is not None}
        if not (due and schedule.leaves_first):
            for way in [way for way in level.under_way if way.apply_at <= step]:
                yield from self._apply(level, way)
        if not due:
            return
        buckets = [i for i, each in enumerate(level.script.buckets) if each.part in due]
        for way in [way for way in level.under_way if set(way.buckets) & set(buckets)]:
            yield from self._apply(level, way)
        yield from self._timeline.compute("round", level.cost.leaving(buckets))
        way = self._leaves(level, next(iter(due.values())).apply_at, buckets)
        for i, end in zip(way.buckets, way.ends, strict=True):
            yield from self._submit(level, i, end)
        if way.apply_at <= step:
            yield from self._apply(level, way)

    def _apply(self, level: _Level, way: _Way) -> Generator[Activity, None, None]:
        for end in way.ends:
            yield from self._wait(end)
        level.under_way.remove(way)
        yield from self._timeline.compute("apply", level.cost.applying(way.buckets))

    # ---- both -----------------------------------------------------------------------------------------

    def _leaves(self, level: _Level, apply_at: int, buckets: Sequence[int]) -> _Way:
        way = _Way(apply_at, buckets, [Activity("exchange", 0.0) for _ in buckets])
        if buckets:
            level.under_way.append(way)
        return way

    def _submit(self, level: _Level, i: int, over: Activity) -> Generator[Activity, None, None]:
        inline = level.script.strategy.compressor.inline
        job = _Job(level.script.buckets[i], level.cost.segments(i), over)
        yield from level.lane.submit(job, inline)

    def _wait(self, end: Activity) -> Generator[Activity, None, None]:
        begun = self._timeline.clock.now
        yield end
        self._timeline.note(MAIN, WAITING, begun)


def simulate(rehearsal: Rehearsal, profile: Profile, costs: Sequence[CostOf], network: Network) -> Simulated:
    """Run a strategy for a few steps, or for as many as its rounds take to come round.

    Args:
        rehearsal: its buckets and messages on this cluster.
        costs: of each level.
        network: links and processors of the cluster.
    """
    rank = _Rank(rehearsal, profile, costs, network)
    return rank.run(_first(rehearsal), _cycle(rehearsal))


def _first(rehearsal: Rehearsal) -> int:
    """The step from which the strategy does what it does for most of the training."""
    firsts = [0]
    for script in rehearsal.levels:
        rounds = script.strategy.rounds
        starts = Schedule(script.strategy, TRAINING).phase_starts
        firsts += [rounds.start_step if isinstance(rounds, PeriodicRounds) else 0, *starts[1:2]]
        overlap = script.strategy.overlap
        firsts.append(overlap.warmup_steps if isinstance(overlap, LateOverlap) else 0)
    return max(firsts)


def _cycle(rehearsal: Rehearsal) -> int:
    """So many steps make whole periods."""
    periods = [
        script.strategy.rounds.sync_every
        for script in rehearsal.levels
        if isinstance(script.strategy.rounds, PeriodicRounds)
    ]
    longest = max(periods, default=4)
    return longest * -(-_FEWEST // longest)


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
