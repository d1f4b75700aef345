"""When a session's rounds start, and when their answers are applied, by the strategy's rounds and overlap."""

from __future__ import annotations

from collections import deque

from tacit.contracts import AdaptiveRounds, ScheduleState, Sync
from tacit.session.round_costs import KEPT
from tacit.strategy import Strategy

SHOWN = ("period", "delay", "local")
"""The keys of the schedule state whose changes are logged."""


class Schedule:
    """A strategy's rounds and its overlap, with their present state.

    Args:
        strategy: has the rounds and the overlap.
        known: further values that the rounds need (`Rounds.needs`).

    Attributes:
        log: (step, values) of the keys `SHOWN` whenever they change; the last thousand.
        observed_metrics: the metrics that the rounds observe; empty if they do not depend on measurements.
        leaves_first: whether a round starts before an answer that is due after the same step is applied.
        always: whether a round follows every step, and is applied at once; then `at` need not be asked.
    """

    def __init__(self, strategy: Strategy, known: ScheduleState | None = None) -> None:
        rounds = self._rounds = strategy.rounds
        self._overlap = strategy.overlap
        self._leader: Schedule | None = None
        self.log: deque[tuple[int, ScheduleState]] = deque(maxlen=KEPT)
        self.observed_metrics = rounds.observed_metrics
        self.leaves_first = rounds.phased
        self.always = rounds.always and not strategy.overlap.steps
        self.set_state({**rounds.start(), **(known or {})}, step=0)

    @property
    def state(self) -> ScheduleState:
        """The present schedule state; for rounds that follow another schedule, the state of that one."""
        return self._state if self._leader is None else self._leader.state

    def set_state(self, state: ScheduleState, step: int) -> None:
        """Use this state from a step on."""
        self._state = state
        shown = {key: state[key] for key in SHOWN if key in state}
        if shown != (self.log[-1][1] if self.log else {}):
            self.log.append((step, shown))

    def follow(self, leader: Schedule) -> None:
        """Use the state of another schedule."""
        self._leader = leader

    def at(self, step: int, part: int = 0) -> Sync | None:
        """The round of the part that follows the step, if one does."""
        state = self._state if self._leader is None else self._leader.state
        sync = self._rounds.at(step, state, part)
        return sync if sync is None or not self._overlap.steps else self._overlapped(sync)

    def sync_at(self, step: int) -> Sync:
        """The round after the step, whether or not one is due."""
        if (due := self.at(step)) is not None:
            return due
        sync = self._rounds.sync(step, self.state)
        return self._overlapped(sync) if self._overlap.steps else sync

    def _overlapped(self, sync: Sync) -> Sync:
        return sync._replace(apply_at=self._overlap.apply_at(sync.apply_at))

    def inactive(self, step: int) -> bool:
        """Whether another level still keeps the replicas equal in this step: there is nothing to do."""
        return step < self._rounds.start_step

    def observe(self, facts: ScheduleState, step: int) -> None:
        """Change the state by measurements of the training; see `AdaptiveRounds.observe`."""
        assert isinstance(self._rounds, AdaptiveRounds)
        self.set_state(self._rounds.observe(self.state, facts), step)

    @property
    def phase_starts(self) -> list[int]:
        """The first step of each phase; none where there are no phases."""
        starts = [0]
        for steps, _ in self._rounds.phases(self.state):
            starts.append(starts[-1] + steps)
        return starts[:-1]
