"""Simulated steps of a training: computing, the lane's exchanges, and what training waits for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tacit.exchange.joined_requests import FEW
from tacit.optimizer_hooks.scaled_variance import PERIOD, SAMPLED
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Activity, Network
from tacit.planning.simulation.costs import CostOf
from tacit.planning.simulation.gpu import CopyingLane, GpuTimeline, StreamedLane
from tacit.planning.simulation.lane import ClockJob, ClockLane
from tacit.planning.simulation.rehearsal import TRAINING, LevelScript
from tacit.planning.simulation.timeline import ClockTimeline, Simulated
from tacit.session.schedule import Schedule

_FEWEST, _MOST = 8, 1000
"""The least number of simulated steps, and as many before them that do not count; and the most steps of a
period.
"""


class _RoundUnderWay(NamedTuple):
    """A round under way: when it is applied, its buckets, and the end of each one's exchange."""

    apply_at: int
    buckets: Sequence[int]
    ends: Sequence[Activity]


@dataclass(eq=False)
class _Level:
    script: LevelScript
    cost: CostOf
    schedule: Schedule
    lane: ClockLane
    under_way: list[_RoundUnderWay] = field(default_factory=list)


class _Rank:
    """The simulated rank, which stands for all."""

    def __init__(self, costs: Sequence[CostOf], profile: Profile, network: Network) -> None:
        gpu, self._profile = profile.gpu, profile
        self._timeline = (
            ClockTimeline(profile, network) if gpu is None else GpuTimeline(profile, network, gpu)
        )
        self._levels = [
            _Level(cost.script, cost, schedule, _lane(self._timeline, cost.script))
            for cost, schedule in zip(costs, _schedules(costs), strict=True)
        ]

    def run(self, first: int, steps: int) -> Simulated:
        """Simulate twice as many steps from the first; the second half counts."""
        self._timeline.clock.run(self._steps(first, steps))
        return self._timeline.end()

    def _steps(self, first: int, steps: int) -> Generator[Activity, None, None]:
        for number in range(2 * steps):
            if number == steps:
                yield from self._timeline.drained()
                self._timeline.begin(steps)
            yield from self._step(first + number)
            yield from self._timeline.step_ended()
        yield from self._timeline.drained()

    def _step(self, step: int) -> Generator[Activity, None, None]:
        timed, near, timeline = self._profile.step, self._levels[0], self._timeline
        yield from timeline.idle("loading", timed.loading)
        yield from timeline.compute("data", timed.data - timed.loading)
        gradients = near.script.strategy.subject != "delta"
        if gradients and self._profile.buffers:
            yield from self._broadcast(self._profile.buffers)
        yield from timeline.compute("forward", timed.forward)
        late = near.script.strategy.overlap.steps > 0
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
            if level.script.strategy.variance == "scaled" and (step + 1) % PERIOD == 0:
                yield from self._compared()

    # ---- gradients ------------------------------------------------------------------------------------

    def _backward(self, level: _Level, due: bool) -> Generator[Activity, None, None]:
        ready = {each.name: each.ready for each in self._profile.step.parameters}
        at = 0.0
        buckets = range(len(level.script.buckets)) if due else ()
        round_ = self._leaves(level, 0, buckets)
        for i, end in zip(round_.buckets, round_.ends, strict=True):
            until = max(at, *(ready[name] for name in level.script.buckets[i].names))
            yield from self._timeline.compute("backward", until - at)
            at = until
            yield from self._submit(level, i, end)
        yield from self._timeline.compute("backward", self._profile.step.backward - at)

    def _settle(self, level: _Level) -> Generator[Activity, None, None]:
        for round_ in level.under_way:
            for end in round_.ends:
                yield from self._timeline.wait(end, level.script.strategy.subject != "nothing")
        level.under_way.clear()

    def _broadcast(self, size: int) -> Generator[Activity, None, None]:
        crossing = size if self._timeline.network.nodes > 1 else 0
        by_nccl = self._profile.gpu is not None and self._profile.gpu.by_nccl
        sent = self._timeline.send("Broadcast", "", size, crossing, "buffers", by_nccl=by_nccl)
        yield from self._timeline.wait(sent, by_host=not by_nccl)

    def _compared(self) -> Generator[Activity, None, None]:
        """Replicas compare samples of their gradients, where the optimizer's state is as large as Adam's."""
        network, profile = self._timeline.network, self._profile
        if profile.state_bytes < 2 * profile.model_bytes:
            return
        size = sum(4 * min(p.numel(), SAMPLED) for p in profile.named.values())
        direct = network.world <= FEW
        sent = (network.world - 1) * size if direct else 2 * size
        crossing = (network.world - network.ranks) * network.ranks * size if direct else 2 * size
        kind = "AllGather" if direct else "AllReduce"
        by_nccl = profile.gpu is not None and profile.gpu.by_nccl
        crossing = crossing if network.nodes > 1 else 0
        message = self._timeline.send(kind, "", sent, crossing, "variances", by_nccl=by_nccl)
        yield from self._timeline.wait(message, by_host=not by_nccl)

    # ---- deltas ---------------------------------------------------------------------------------------

    def _deltas(self, level: _Level, step: int) -> Generator[Activity, None, None]:
        schedule, parts = level.schedule, level.script.strategy.parts
        due = {part: sync for part in range(parts) if (sync := schedule.at(step, part)) is not None}
        if not (due and schedule.leaves_first):
            for round_ in [each for each in level.under_way if each.apply_at <= step]:
                yield from self._apply(level, round_)
        if not due:
            return
        buckets = [i for i, each in enumerate(level.script.buckets) if each.part in due]
        for round_ in [each for each in level.under_way if set(each.buckets) & set(buckets)]:
            yield from self._apply(level, round_)
        yield from self._timeline.compute("round", level.cost.leaving(buckets))
        round_ = self._leaves(level, next(iter(due.values())).apply_at, buckets)
        for i, end in zip(round_.buckets, round_.ends, strict=True):
            yield from self._submit(level, i, end)
        if round_.apply_at <= step:
            yield from self._apply(level, round_)

    def _apply(self, level: _Level, round_: _RoundUnderWay) -> Generator[Activity, None, None]:
        for end in round_.ends:
            yield from self._timeline.wait(end)
        level.under_way.remove(round_)
        yield from self._timeline.compute("apply", level.cost.applying(round_.buckets))

    # ---- both -----------------------------------------------------------------------------------------

    def _leaves(self, level: _Level, apply_at: int, buckets: Sequence[int]) -> _RoundUnderWay:
        round_ = _RoundUnderWay(apply_at, buckets, [Activity("exchange", 0.0) for _ in buckets])
        if buckets:
            level.under_way.append(round_)
        return round_

    def _submit(self, level: _Level, i: int, over: Activity) -> Generator[Activity, None, None]:
        inline = level.script.strategy.compressor.inline
        cost = level.cost
        job = ClockJob(level.script.buckets[i], cost.segments(i), over, cost.launching(i))
        yield from level.lane.submit(job, inline)


def _lane(timeline: ClockTimeline, script: LevelScript) -> ClockLane:
    """The lane of a level's exchanges."""
    if not isinstance(timeline, GpuTimeline):
        return ClockLane(timeline)
    return StreamedLane(timeline) if script.on_gpu else CopyingLane(timeline)


def simulate(costs: Sequence[CostOf], profile: Profile, network: Network) -> Simulated:
    """Simulate a strategy for a few steps, or for a whole period of its rounds.

    Args:
        costs: of each level, with its buckets and messages on this cluster.
        network: links and processors of the cluster.
    """
    first = _first(costs)
    return _Rank(costs, profile, network).run(first, _cycle(costs, first))


def _schedules(costs: Sequence[CostOf]) -> list[Schedule]:
    schedules = [Schedule(cost.script.strategy, TRAINING) for cost in costs]
    for schedule in schedules[:-1]:
        schedule.follow(schedules[-1])
    return schedules


def _first(costs: Sequence[CostOf]) -> int:
    """The first step of the strategy's longest phase."""
    firsts = [0]
    for strategy in (cost.script.strategy for cost in costs):
        starts = Schedule(strategy, TRAINING).phase_starts
        frozen = 0 if strategy.renewals is None else strategy.renewals.freeze_step
        firsts += [strategy.rounds.start_step, *starts[1:2], frozen, strategy.overlap.warmup_steps]
    return max(firsts)


def _cycle(costs: Sequence[CostOf], first: int) -> int:
    """The number of steps that makes whole periods of all levels and parts."""
    periods = [
        _period(schedule, first, part)
        for schedule, cost in zip(_schedules(costs), costs, strict=True)
        for part in range(cost.script.strategy.parts)
    ]
    longest = max(periods)
    return longest * -(-_FEWEST // longest)


def _period(schedule: Schedule, first: int, part: int) -> int:
    """The steps from one round of the part to the next; 1 if there is none in the next thousand."""
    due = (step for step in range(first, first + _MOST) if schedule.at(step, part) is not None)
    one, other = next(due, 0), next(due, 0)
    return max(1, other - one)
