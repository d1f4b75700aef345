"""Ranks compare their records of the same step through the launcher's store."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tacit.failure.bounded_store import BoundedStore

DIFFERENT = "different: "
"""The prefix of an alarm that needs no further search for the failed rank."""


class StepNote(NamedTuple):
    """A rank's record of a step, which must be equal on every rank.

    Attributes:
        step: the number of steps before it.
        text: the recorded values.
        loads: the number of checkpoints loaded before: each changes the number of steps.
    """

    step: int
    text: str
    loads: int = 0


class StepHistory(Protocol):
    """A rank's records, step by step."""

    @property
    def last(self) -> StepNote | None:
        """The record of the last step."""

    def take(self) -> StepNote | None:
        """The record to compare now, of those since the last call; called in another thread."""

    def differ(self, one: int, ones: StepNote, other: int, others: StepNote) -> str | None:
        """A sentence on two ranks' different records of the same step; None: they are equal."""


class StepComparison:
    """The comparison on one rank: the first rank stores its record of a step, and the others compare theirs.

    So the store serves one message a rank and comparison, and holds one text for each.

    Args:
        store: used by these ranks alone.
        rank: this rank.
        notes: its records.
        shard: the number of its shard of the model: ranks with the same shard compare.
    """

    def __init__(self, store: BoundedStore, rank: int, notes: StepHistory, shard: int = 0) -> None:
        self._store, self._rank, self._notes, self._shard = store, rank, notes, shard

    def look(self) -> str | None:
        """Compare, every few seconds. Returns what differs, or None."""
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
