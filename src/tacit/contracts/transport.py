"""What sends messages: the only contract with side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tacit.contracts.compressor import Collective
from tacit.contracts.context import AxisRank


class Posted(Protocol):
    """A request that has been started.

    Attributes:
        sent: bytes that this rank sends, by the formulas of `transports.message_layout.ring_bytes`.
    """

    sent: int

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call`, from any thread, once the request has finished or failed."""

    def answer(self) -> Any:
        """The answer, or raise the error. To be called only after the callback of `on_done`."""


class Transport(Protocol):
    """Performs collectives; the only contract with side effects."""

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """The replicas of each node; empty where no topology needs to know."""

    def open(self, stages: Mapping[str, int]) -> None:
        """Prepare for exchanges of at most `stages[axis]` requests on each axis. A collective call.

        Those of `Permute` do not count, but where they are all, the axis is there with 1.
        """

    def ranks(self, axis: str) -> Sequence[int]:
        """The replicas on this axis with this one, in order; counted from 0 over all replicas."""

    def place(self, axis: str) -> AxisRank:
        """This rank on the axis, and the number of ranks there."""

    def global_rank(self, replica: int) -> int:
        """The replica's rank among all processes of the job, for messages to users."""

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Start a collective.

        All members of the axis post the requests of one `stage` (the index of the request in its exchange on
        that axis, where those of `Permute` are counted separately) in the same order. `key` names the
        exchange: no two requests of one key, axis and stage are in progress at once.
        """
