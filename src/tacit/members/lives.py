"""How a member asks the store, and knows from it which others are alive."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
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


def life_of(sign: str) -> Life | None:
    """What a sign of life says; None of the empty one."""
    if not sign:
        return None
    found: Life = described.read(sign, Annotated[Life, described.JSON], "a sign of life")
    return found


class Lives:
    """Which members are alive, by the signs of life that this object has been told.

    Args:
        silence: seconds after which one without a new sign is dead.
        ranks: those of a member's ranks whose signs count; None: all. It is dead when one of them is.
    """

    def __init__(self, silence: float, ranks: Sequence[int] | None = None) -> None:
        self._silence, self._ranks = silence, ranks
        self._seen: dict[str, tuple[str, float]] = {}
        """By its key: a sign, and when it was new."""
        self._last: dict[str, Life] = {}
        self._asked_since = 0.0
        self._heard: Sequence[str] = ()

    def keys(self, members: Iterable[MemberArrival]) -> list[str]:
        """Where these members write their signs."""
        return [life_key(each.id, rank) for each in members for rank in self._ranks_of(each)]

    def hear(self, keys: Sequence[str], signs: Sequence[str], since: float = 0.0) -> None:
        """What stands under these keys now; "": nothing. `since`: when the store was connected to."""
        now, self._asked_since, self._heard = time.monotonic(), since, keys
        for key, sign in zip(keys, signs, strict=True):
            if self._seen.get(key, ("", 0.0))[0] != sign or key not in self._seen:
                self._seen[key] = sign, now
                if life := life_of(sign):
                    self._last[key] = life

    def is_alive(self, member: MemberArrival) -> bool:
        """Whether the member has given a sign of life lately, and has not left; before any, it is."""
        now = time.monotonic()
        for key in self.keys([member]):
            sign, since = self._seen.get(key, ("", now))
            # While the store was away nobody could give one.
            if now - max(since, self._asked_since) >= self._silence:
                return False
            if sign and self._last[key].waits == GONE:
                return False
        return True

    def pause(self) -> float:
        """Seconds to the next look: a beat, or less if one would have been silent for too long by then."""
        now = time.monotonic()
        ages = [now - max(self._seen[key][1], self._asked_since) for key in self._heard]
        return min([BEAT, *(self._silence - age for age in ages if age < self._silence)])

    def last_of(self, member: MemberArrival, rank: int = 0) -> Life | None:
        """What the last sign of life of one of its ranks said."""
        return self._last.get(life_key(member.id, rank))

    def fill(self, store: KeyValueStore) -> None:
        """Write the last signs of life into a store that has been started again: the dead cannot."""
        for key, life in self._last.items():
            store.compare_set(key, "", json.dumps(asdict(life)))

    def _ranks_of(self, member: MemberArrival) -> Sequence[int]:
        return range(len(member.ranks)) if self._ranks is None else self._ranks


class StoreLink:
    """Asks the store, and connects again where that has failed. Several threads may ask.

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

    def store(self, call: Callable[[BoundedStore], T]) -> T:
        """The answer of the store.

        Raises:
            PeerLost: it does not answer for longer than `patience`.
        """
        began, told, pause, new = time.monotonic(), False, BEAT, True
        while True:
            try:
                bounded = self._bounded  # another thread may close it meanwhile
                new = bounded is None
                if bounded is None:
                    bounded = self._bounded = BoundedStore(self._way.connected(ANSWER), ANSWER)
                    self.since = time.monotonic()
                return call(bounded)
            except RuntimeError as error:
                self.close()
                if time.monotonic() - (self._away_since() or began) >= self._patience:
                    raise PeerLost(
                        f"{self._way.name} does not answer for {self._patience:g} s ({first_line(error)}): "
                        f"start it there, by {self._way.start}; members that live write themselves in again"
                    ) from error
                if new and not told:  # an old connection's end says nothing of one that was started again
                    told = True
                    _log.warning(
                        "%s does not answer (%s): waiting for it, %g s at most",
                        *(self._way.name, first_line(error), self._patience),
                    )
                time.sleep(pause)
                pause = min(2 * pause, self._way.longest_pause)

    def write(self, key: str, text: str) -> None:
        """Write a text."""
        self.store(lambda store: store.set(key, text))

    def texts(self, keys: Sequence[str]) -> list[str]:
        """What stands under these keys; "": nothing."""
        return self.store(lambda store: store.texts(keys))

    def lives(self, members: Sequence[MemberArrival], rank: int = 0) -> list[Life | None]:
        """The last sign of life of a rank of each member; the first one speaks for all of it."""
        return [*map(life_of, self.texts([life_key(each.id, rank) for each in members]))]

    def close(self) -> None:
        """End the connection."""
        bounded, self._bounded = self._bounded, None
        if bounded is not None:
            bounded.close()
