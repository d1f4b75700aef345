"""Ranks compare, through the launcher's store, what each noted after the same step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tacit.transports.bounded import BoundedStore

DIFFERENT = "different: "
"""How a text begins that says all there is to say."""


class Noted(NamedTuple):
    """What a rank noted, which must be the same text on every rank.

    Attributes:
        step: after how many steps.
        text: what it was.
    """

    step: int
    text: str


class Notes(Protocol):
    """A rank's notes."""

    @property
    def last(self) -> Noted | None:
        """What was noted after the last step."""

    def take(self) -> Noted | None:
        """What to compare now, of what was noted since the last time; called in another thread."""

    def differ(self, one: int, ones: Noted, other: int, others: Noted) -> str:
        """What to say of two ranks whose notes differ."""


class Comparing:
    """One rank's part: the first that has noted a step says what, and all others compare with it.

    So the store serves one message a rank and question, and keeps one text for each.

    Args:
        store: seen by these ranks alone.
        rank: this rank.
        notes: what it has noted.
    """

    def __init__(self, store: BoundedStore, rank: int, notes: Notes) -> None:
        self._store, self._rank, self._notes = store, rank, notes

    def look(self) -> str | None:
        """What is different, if anything is; to be called every few seconds."""
        mine = self._notes.take()
        return None if mine is None else self._with_the_first(mine)

    def end(self) -> str | None:
        """The same of the last step; in a `Join` context ranks may end after different ones."""
        mine = self._notes.last
        return None if mine is None else self._with_the_first(mine)

    def _with_the_first(self, mine: Noted) -> str | None:
        said = self._store.compare_set(f"noted/{mine.step}", "", f"{self._rank} {mine.text}").decode()
        rank, _, text = said.partition(" ")
        if text == mine.text:
            return None
        first = Noted(mine.step, text)
        return DIFFERENT + self._notes.differ(int(rank), first, self._rank, mine)
