"""Members of unequal speed: each steps on until all are ready for a round, and means are weighed by steps.

Semi-synchronous training (Stripelis et al. 2021, arXiv 2102.02849). A member's place stays one number for
all, the rounds times their period: steps beyond the period are not counted, as those that a GradScaler skips
are not. So newcomers, schedules and closings go by what they did. A member that is ready writes so where
members find each other, and looks every now and then whether all others have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from tacit.errors import PeerLost
from tacit.exchange.joined_requests import average_
from tacit.levels.level import Level
from tacit.members.lives import BEAT, StoreLink
from tacit.members.roster import Roster


class SemiSynchronous:
    """Of a member: how many steps it has taken since the last round, and whether all are ready for the next.

    Args:
        roster: the member's.
        on: whether members are semi-synchronous; else nothing happens here.
        weight: of a step, such as a batch's samples; None: 1.

    Attributes:
        beyond: whether the last step was beyond its period.
        extra: how many were, in all.
    """

    def __init__(self, roster: Roster, on: bool, weight: float | None) -> None:
        self._roster, self._on, self._weight = roster, on, weight or 1.0
        self._ask = StoreLink(roster.way, 0.0)
        self._looked, self._round = 0.0, 0
        self._taken = self.extra = 0
        self.beyond = False

    @property
    def metrics(self) -> dict[str, int]:
        """How many steps were not counted, in all."""
        return {"extra_steps": self.extra} if self._on else {}

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Note a step. Returns whether it is beyond the period, as others are not ready for the round yet."""
        self.beyond = self._on and self._is_beyond(levels[0])
        self.extra += self.beyond
        return self.beyond

    def _is_beyond(self, level: Level) -> bool:
        roster = self._roster
        assert level.progress is not None
        self._follow(level)
        self._taken += 1
        if roster.called.is_set() or roster.away_since or not level.progress.acts_after(level.session.step):
            return False
        now = time.monotonic()
        if now - self._looked >= BEAT:
            self._looked = now
            if self._all_ready(level.session.round):
                self._looked = 0.0
                return False
        level.progress.writes.note()
        return True

    def _follow(self, level: Level) -> None:
        """Count from 0 after a round, be it this member's or that of another, whose state it has taken."""
        if level.session.round != self._round:
            self._round, self._taken = level.session.round, 0

    def _all_ready(self, round: int) -> bool:
        """Whether all have their period's steps; a store that was started again is told once more."""
        period = self._roster.period
        names = [f"ready/{period.number}/{round}/{place}" for place in range(len(period.members))]
        try:
            self._ask.store(lambda store: store.set(names[self._roster.place], "1"))
            return self._ask.store(lambda store: store.check(names))
        except PeerLost:
            return True  # as ever where it is away

    def weigh(self, levels: Sequence[Level], closes: bool = False) -> None:
        """Weigh this member's part of the mean that comes next, if one does, by its steps. A collective call.

        `closes`: whether replicas become equal now.

        Raises:
            RoundError: it failed.
        """
        if not self._on:
            return
        (level,) = levels
        assert level.progress is not None
        if not closes and not level.progress.acts_after(level.session.step):
            return
        self._follow(level)
        mine = self._weight * self._taken
        mean, scope = torch.tensor([mine]), level.session.strategy.topology.scope
        level.session.ask(partial(average_, mean, scope), "steps", of=mean)
        level.progress.weigh(mine / float(mean) if float(mean) else 1.0)

    def close(self) -> None:
        """End the connection."""
        self._ask.close()
