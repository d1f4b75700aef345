"""Ranks compare, through the launcher's store, what each noted after the same step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tacit.failure.bounded_store import BoundedStore

DIFFERENT = "different: "
"""How an alarm begins that needs no further search for who failed."""


class StepNote(NamedTuple):
    """What a rank noted, which must say the same on every rank.

    Attributes:
        step: after how many steps.
        text: what it was.
        loads: how many checkpoints had been loaded before: after each, steps are counted from its own.
    """

    step: int
    text: str
    loads: int = 0


class StepHistory(Protocol):
    """What a rank has noted, step by step."""

    @property
    def last(self) -> StepNote | None:
        """What was noted after the last step."""

    def take(self) -> StepNote | None:
        """What to compare now, of what was noted since the last time; called in another thread."""

    def differ(self, one: int, ones: StepNote, other: int, others: StepNote) -> str | None:
        """What to say of two ranks and their notes of the same step; None where these say the same."""


class StepComparison:
    """One rank's part: the first rank to note a step stores its note, and the others compare theirs with it.

    So the store serves one message a rank and question, and keeps one text for each.

    Args:
        store: seen by these ranks alone.
        rank: this rank.
        notes: what it has noted.
        shard: which one of the model it has: ranks of the same compare.
    """

    def __init__(self, store: BoundedStore, rank: int, notes: StepHistory, shard: int = 0) -> None:
        self._store, self._rank, self._notes, self._shard = store, rank, notes, shard

    def look(self) -> str | None:
        """To be called every few seconds; returns what differs, or None."""
        mine = self._notes.take()
        return None if mine is None else self._with_the_first(mine)

    def end(self) -> str | None:
        """Compare the last step; returns what differs, or None."""
        mine = self._notes.last
        return None if mine is None else self._with_the_first(mine)

    def _with_the_first(self, mine: StepNote) -> str | None:
        key = f"noted/{self._shard}/{mine.loads}/{mine.step}"
        said = self._store.compare_set(key, "", f"{self._rank} {mine.text}").decode()
        rank, _, text = said.partition(" ")
        wrong = self._notes.differ(int(rank), mine._replace(text=text), self._rank, mine)
        return None if wrong is None else DIFFERENT + wrong
