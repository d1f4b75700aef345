"""What really sends: the only contract with effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tacit.contracts.collectives import Collective
from tacit.contracts.context import AxisRank


class Posted(Protocol):
    """A request on its way."""

    def on_done(self, call: Callable[[], None]) -> None:
        """Have `call` called, from any thread, once there is an answer or a failure."""

    def answer(self) -> Any:
        """The answer; raises what went wrong. Only after the call of `on_done`."""


class Transport(Protocol):
    """The only contract with effects."""

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """Which replicas share a node; empty where nobody needs to know."""

    def open(self, stages: Mapping[str, int]) -> None:
        """Be ready for exchanges that speak so many times on each axis. A collective call."""

    def ranks(self, axis: str) -> Sequence[int]:
        """Which replicas share the axis with this one, in order; counted from 0 over all replicas."""

    def place(self, axis: str) -> AxisRank:
        """This rank's place on the axis."""

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Start a collective.

        All members of the axis post the requests of one `stage` (the how-manieth request of its exchange on
        that axis) in the same order. `key` names the exchange: no two requests of one key, axis and stage
        are under way at once.
        """
