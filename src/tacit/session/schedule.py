"""When a session's rounds leave, and when their answers are applied: the one place that knows both."""

from __future__ import annotations

from collections import deque

from tacit.contracts import AdaptiveRounds, ScheduleState, Sync
from tacit.session.stats import KEPT
from tacit.strategy import Strategy

SHOWN = ("period", "delay", "local")
"""The keys of the schedule state that are worth showing where they change."""


class Schedule:
    """A strategy's rounds and its overlap, with their present state.

    Args:
        strategy: whose rounds and overlap.
        known: what else the rounds need to know of the training.

    Attributes:
        log: (step, values) of what is worth showing, noted where it changes; the last thousand.
        observed_metrics: what the rounds observe; empty where they do not change.
        leaves_first: whether a round leaves before an answer that is applied after the same step.
    """

    def __init__(self, strategy: Strategy, known: ScheduleState | None = None) -> None:
        rounds = self._rounds = strategy.rounds
        self._overlap = strategy.overlap
        self._leader: Schedule | None = None
        self.log: deque[tuple[int, ScheduleState]] = deque(maxlen=KEPT)
        self.observed_metrics: frozenset[str] = frozenset()
        if isinstance(rounds, AdaptiveRounds):
            self.observed_metrics = rounds.observed_metrics
        self.leaves_first = rounds.phased
        self.set_state({**rounds.start(), **(known or {})}, step=0)

    @property
    def state(self) -> ScheduleState:
        """What the rounds go by; for rounds that follow, the state of those that they follow."""
        return self._state if self._leader is None else self._leader.state

    def set_state(self, state: ScheduleState, step: int) -> None:
        """Go by this state from a step on."""
        self._state = state
        shown = {key: state[key] for key in SHOWN if key in state}
        if shown != (self.log[-1][1] if self.log else {}):
            self.log.append((step, shown))

    def follow(self, leader: Schedule) -> None:
        """Go by the state of another schedule."""
        self._leader = leader

    def at(self, step: int, part: int = 0) -> Sync | None:
        """The round of the part that follows the step, if one does."""
        sync = self._rounds.at(step, self.state, part)
        return sync if sync is None else self._overlapped(sync)

    def sync_at(self, step: int) -> Sync:
        """How a round that follows the step goes, whether or not one is due."""
        if (due := self.at(step)) is not None:
            return due
        return self._overlapped(self._rounds.sync(step, self.state))

    def _overlapped(self, sync: Sync) -> Sync:
        if not self._overlap.steps:
            return sync
        return sync._replace(apply_at=self._overlap.apply_at(sync.apply_at))

    def inactive(self, step: int) -> bool:
        """Whether another level still keeps the replicas equal in this step: there is nothing to do."""
        return step < self._rounds.start_step

    def observe(self, facts: ScheduleState, step: int) -> None:
        """Change the state by what the training shows; see `AdaptiveRounds.observe`."""
        assert isinstance(self._rounds, AdaptiveRounds)
        self.set_state(self._rounds.observe(self.state, facts), step)

    @property
    def phase_starts(self) -> list[int]:
        """The first step of each phase; none where there are no phases."""
        starts = [0]
        for steps, _ in self._rounds.phases(self.state):
            starts.append(starts[-1] + steps)
        return starts[:-1]
