"""Which replica of a run is killed or frozen when: a schedule by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Went: TypeAlias = Literal["killed", "frozen"]
HUB_AWAY = 5.0
"""Seconds."""
_WAYS: tuple[Went, Went] = ("killed", "frozen")


@dataclass(frozen=True)
class ChurnEvent:
    """What was done to a replica.

    Attributes:
        at: seconds since 1970.
        node: where the replica is.
        what: "killed", "frozen" or "back": started again, or thawed.
    """

    at: float
    node: int
    what: Went | Literal["back"]


class Churn:
    """Every so many seconds one replica is killed or frozen, and the one before comes back.

    A killed one is started again, a frozen one goes on.

    Args:
        every: seconds.
        seed: decides which replica it is, and how it goes.
        ready: asked until it says that all replicas are at work: the first goes `every` seconds after that.
        hub_goes: seconds after that at which the hub is killed; it is started again after `HUB_AWAY`.

    Attributes:
        events: what was done until now.
        away: what was done to the replica that is away.
        over: whether nothing is to be done any more.
        hub_went: when the hub was killed, in seconds since 1970.
    """

    def __init__(
        self, every: float, seed: int, ready: Callable[[], bool], hub_goes: Sequence[float] = ()
    ) -> None:
        self.every, self._ready, self._hub_goes = every, ready, [*hub_goes]
        self.events: list[ChurnEvent] = []
        self.away: ChurnEvent | None = None
        self.over = False
        self.hub_went: list[float] = []
        self.due: float | None = None
        """When the next one goes, by time.monotonic(); None until all are at work."""
        self._chance = random.Random(seed)

    def is_due(self, now: float) -> bool:
        """Whether a replica is to go now."""
        if self.due is None and self._ready():
            self.due = now + self.every
            self._hub_goes = [now + each for each in self._hub_goes]
        return self.due is not None and now >= self.due

    def hub_is_due(self, now: float) -> bool:
        """Whether the hub is to be killed now; True once for each time."""
        if self.due is None or not self._hub_goes or now < self._hub_goes[0]:
            return False
        del self._hub_goes[0]
        self.hub_went.append(time.time())
        return True

    def strike(self, present: Sequence[int]) -> ChurnEvent:
        """Decide which of these nodes' replicas goes now, and note it."""
        node, how = self._chance.choice(present), self._chance.choice(_WAYS)
        self.due = time.monotonic() + self.every
        self.away = ChurnEvent(time.time(), node, how)
        self.events.append(self.away)
        return self.away

    def came_back(self, node: int) -> None:
        """Note that a replica was started again, or goes on."""
        self.events.append(ChurnEvent(time.time(), node, "back"))

    def end(self) -> None:
        """Have nothing more happen to any replica."""
        self.over = True
