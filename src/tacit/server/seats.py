"""Who is connected to a server, what they have declared, and which of their messages wait for an answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tacit.contracts import Piece, Sender
from tacit.server.averager import Averager
from tacit.server.keeper import Keeper
from tacit.transports.pairs import Header, Pair, Parcel


@dataclass
class Spec:
    """How a kind of message of one worker is read, and its answer.

    Attributes:
        key: of the lot that it is about.
        back: of a worker that enters, how parameters come back to it.
    """

    key: str
    pieces: tuple[Piece, ...]
    pulls: tuple[Piece, ...]
    back: Piece | None
    arriving: Parcel
    leaving: Parcel

    @classmethod
    def told(cls, told: Mapping[str, Any]) -> Spec:
        """As a worker has declared it."""
        pieces, pulls = tuple(told["pieces"]), tuple(told["pulls"])
        return cls(told["key"], pieces, pulls, told.get("back"), Parcel(pieces), Parcel(pulls))


@dataclass(eq=False)
class Seat:
    """A connected worker.

    Attributes:
        refused: of declared messages, why they cannot be read.
        heard: when it last was.
        left: whether it has said goodbye.
        why: why others were told that it is gone; empty while they were not.
        broken: whether its connection has closed.
        process: which process it is in; of no meaning but that it is equal of equal ones.
    """

    sender: Sender
    pair: Pair
    specs: dict[int, Spec] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    left: bool = False
    why: str = ""
    broken: bool = False
    process: str = ""

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"rank {self.sender.worker}"

    @property
    def here(self) -> bool:
        """Whether it is still there."""
        return not (self.left or self.why or self.broken)


@dataclass(frozen=True)
class Arrived:
    """A frame that has come, whole."""

    seat: Seat
    header: Header
    body: Any
    at: float


@dataclass(frozen=True)
class Broken:
    """A connection that has closed."""

    seat: Seat
    why: str


@dataclass
class Waiting:
    """A message that was taken and not answered: since when, and when its worker was last told to wait."""

    header: Header
    since: float
    told: float
    queued: float


class Shard:
    """One lot: its service, the state of that, and who waits for an answer, by (sender, sequence)."""

    def __init__(self, service: Averager | Keeper, saved: Mapping[str, Any] | None) -> None:
        self.service: Any = service
        self.state: Any = service.start() if saved is None else service.load(saved)
        self.waiting: dict[tuple[Sender, int], Waiting] = {}
