"""How a member asks the store, and knows from it which others are alive."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, TypeVar

from tacit import described
from tacit.errors import PeerLost, first_line
from tacit.failure.bounded_store import BoundedStore, KeyValueStore
from tacit.members.record import GONE, Life, MemberArrival
from tacit.members.ways import Way

T = TypeVar("T")
_log = logging.getLogger("tacit")
BEAT = 0.25
"""Seconds between two signs of life, and between two looks at whether somebody has called."""
ANSWER = 5.0
"""Seconds in which the store has to answer a call."""


def life_key(id: str, rank: int) -> str:
    """Where a member's rank writes its signs of life."""
    return f"life/{id}/{rank}"


class Lives:
    """Which members are alive, by their signs of life since this object was made.

    Args:
        ask: asks the store.
        silence: seconds after which one without a new sign is dead.
        ranks: those of a member's ranks whose signs count; None: all. It is dead when one of them is.
    """

    def __init__(self, ask: StoreLink, silence: float, ranks: Sequence[int] | None = None) -> None:
        self._ask, self._silence, self._ranks = ask, silence, ranks
        self._seen: dict[tuple[str, int], tuple[Life | None, float]] = {}
        self._last: dict[tuple[str, int], Life] = {}

    def is_alive(self, member: MemberArrival) -> bool:
        """Whether the member has given a sign of life lately, and has not left."""
        ranks = range(len(member.ranks)) if self._ranks is None else self._ranks
        return all(self._gives_signs((member.id, rank)) for rank in ranks)

    def _gives_signs(self, of: tuple[str, int]) -> bool:
        life, now = self._ask.life(*of), time.monotonic()
        last, since = self._seen.get(of, (None, now))
        if life != last or of not in self._seen:
            since = now
        since = max(since, self._ask.since)  # while the store was away nobody could give one
        self._seen[of] = life, since
        if life is not None:
            self._last[of] = life
        return now - since < self._silence and (life is None or life.waits != GONE)

    def last_of(self, member: MemberArrival, rank: int = 0) -> Life | None:
        """What the last sign of life of one of its ranks said."""
        return self._last.get((member.id, rank))

    def fill(self, store: KeyValueStore) -> None:
        """Write the last signs of life into a store that has been started again: the dead cannot."""
        for (id, rank), life in self._last.items():
            store.compare_set(life_key(id, rank), "", json.dumps(asdict(life)))

    def of(self, members: Sequence[MemberArrival]) -> list[MemberArrival]:
        """Those that are alive."""
        return [each for each in members if self.is_alive(each)]


class StoreLink:
    """Asks the store, and connects again where that has failed.

    Args:
        way: how it is reached.
        patience: seconds to go on trying, with pauses that grow.
        away_since: since when others have found that it does not answer; 0: they have not.

    Attributes:
        since: when the present connection was made, by time.monotonic().
    """

    def __init__(self, way: Way, patience: float, away_since: Callable[[], float] = lambda: 0.0) -> None:
        self._way, self._patience, self._away_since = way, patience, away_since
        self.since = 0.0
        self._bounded: BoundedStore | None = None

    def store(self, call: Callable[[KeyValueStore], T]) -> T:
        """The answer of the store.

        Raises:
            PeerLost: it does not answer for longer than `patience`.
        """
        began, told, pause = time.monotonic(), False, BEAT
        while True:
            try:
                if self._bounded is None:
                    self._bounded = BoundedStore(self._way.connected(ANSWER), ANSWER)
                    self.since = time.monotonic()
                return call(self._bounded)
            except RuntimeError as error:
                self.close()
                if time.monotonic() - (self._away_since() or began) >= self._patience:
                    raise PeerLost(
                        f"{self._way.name} does not answer for {self._patience:g} s ({first_line(error)}): "
                        f"start it there, by {self._way.start}; members that live write themselves in again"
                    ) from error
                if not told:
                    told = True
                    _log.warning(
                        "%s does not answer (%s): waiting for it, %g s at most",
                        *(self._way.name, first_line(error), self._patience),
                    )
                time.sleep(pause)
                pause = min(2 * pause, self._way.longest_pause)

    def life(self, id: str, rank: int = 0) -> Life | None:
        """The last sign of life of a member's rank; the first one speaks for all of it."""

        def read(store: KeyValueStore) -> str:
            return store.get(key).decode() if store.check([key := life_key(id, rank)]) else ""

        text = self.store(read)
        if not text:
            return None
        found: Life = described.read(text, Annotated[Life, described.JSON], "a sign of life")
        return found

    def close(self) -> None:
        """End the connection."""
        if self._bounded is not None:
            self._bounded.close()
            self._bounded = None
