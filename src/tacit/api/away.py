"""What a member does while the hub by which it exchanges is away: it trains on, and misses the rounds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from tacit.api.member_changes import end_under_way
from tacit.environment import HUB
from tacit.levels.level import Level
from tacit.members.roster import Members, Roster
from tacit.members.ways import StoreWay, Way

_log = logging.getLogger("tacit")


def way_of(given: Members) -> Way:
    """How members find each other: by a hub, if they or the environment name one, or by a store.

    Raises:
        ConfigError: what they name cannot be.
        AttachError: there is no secret for a hub.
    """
    hub = given.hub or ("" if given.store else os.environ.get(HUB, ""))
    if not hub:
        return StoreWay(given.address())
    from tacit.stores.hub.several import way_by

    return way_by(hub)


class TimeAlone:
    """Of a member, while the hub is away.

    Args:
        roster: the member's.
        patience: seconds for which it trains on.

    Attributes:
        steps: how many it has taken so.
    """

    def __init__(self, roster: Roster, patience: float) -> None:
        self._roster, self._patience = roster, patience
        self.steps = 0

    def goes_on(self, can: bool) -> bool:
        """Whether this member is to miss the round after its present step, which has failed or not begun.

        `can`: whether replicas step alone.
        """
        roster = self._roster
        away = can and roster.way.carries and roster.is_away()
        if away and time.monotonic() - roster.away_since < self._patience:
            return True
        if self.steps and not away:
            text = "%s meets the others again, and has missed the rounds of %d steps"
            _log.warning(text, roster.name, self.steps)
        self.steps = 0
        return False

    def miss(self, levels: Sequence[Level]) -> None:
        """Count the present step without what follows it: what it has changed stays in the replica."""
        if not self.steps:
            text = "%s is away: %s trains on without rounds, %g s at most"
            _log.warning(text, self._roster.way.name, self._roster.name, self._patience)
            end_under_way(levels)
        for level in levels:
            if level.progress is not None:
                if not self.steps:
                    level.progress.settle_failed()
                level.progress.writes.note()
            level.session.advance()
        self.steps += 1
