"""How members find each other, and reach each other: by a store and Gloo, or by a hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

from tacit.failure.bounded_store import KeyValueStore
from tacit.members.ties import Ties
from tacit.transports.member_links import Board, Meeting, connected, meeting_by


class Watching(Protocol):
    """What tells at once when a member's process ends."""

    @property
    def address(self) -> tuple[str, int]:
        """Where others connect to."""

    def broken(self, watched: Mapping[str, tuple[str, int]]) -> list[str]:
        """Of the members to watch, by name with their addresses: those that have ended."""

    def close(self) -> None:
        """Close all."""


class Way(Protocol):
    """How members find and reach each other.

    Attributes:
        name: of what keeps their texts, for errors; `start`: the command that starts it.
        longest_pause: seconds between two attempts to reach it, at most.
        carries: whether all that members exchange goes by it, so that they are alone while it is away.
        hubs: how many share out what they exchange; 1 where none do.
    """

    name: str
    start: str
    longest_pause: float
    carries: bool
    hubs: int

    def connected(self, seconds: float) -> KeyValueStore:
        """A connection to it that nobody else uses.

        Raises:
            RuntimeError: there is none within so many seconds.
        """

    def ties(self, me: str) -> Watching:
        """What tells whose process has ended; `me`: the name of this member's rank."""

    def meeting(
        self, name: str, me: str, limit: timedelta, is_off: Callable[[], bool], ask: Board
    ) -> Meeting:
        """Where the members of a period meet to make process groups; see there.

        Args:
            me: this one's name.
            ask: where they can leave texts for each other.
        """


class StoreWay:
    """By a store; each member connects to each other."""

    longest_pause, carries, hubs = 0.25, False, 1

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.name = f"the members' store at {address[0]}:{address[1]}"
        self.start = f"python -m tacit.members.store --port {address[1]}"

    def connected(self, seconds: float) -> KeyValueStore:
        """See `Way`."""
        return connected(*self._address, timeout=seconds)

    def ties(self, me: str) -> Ties:
        """See `Way`."""
        return Ties(self._address)

    def meeting(
        self, name: str, me: str, limit: timedelta, is_off: Callable[[], bool], ask: Board
    ) -> Meeting:
        """See `Way`."""
        return meeting_by(ask, name, limit, is_off)
