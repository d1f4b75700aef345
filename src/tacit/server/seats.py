"""Who is connected to a server, what they have declared, and which of their messages wait for an answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tacit.contracts import Sender
from tacit.server.averager import Averager
from tacit.server.keeper import Keeper
from tacit.server.limits import Limits
from tacit.transports.messages import Declared, Hello
from tacit.transports.pairs import Header, Pair, Parcel

NOBODY = Sender(-1, 0)


@dataclass(frozen=True)
class Spec(Declared):
    """A kind of message that a worker has declared, and the memory for it and its answer."""

    arriving: Parcel = field(kw_only=True)
    leaving: Parcel = field(kw_only=True)

    @classmethod
    def told(cls, told: Declared) -> Spec:
        """As a worker has declared it."""
        parcels = {"arriving": Parcel(told.pieces), "leaving": Parcel(told.pulls)}
        return cls(told.key, told.pieces, told.pulls, told.back, **parcels)


@dataclass(eq=False)
class Seat:
    """A connection that has proved itself, and from its first message on, a worker.

    Attributes:
        address: where it comes from.
        sender: which life of which worker it is; `NOBODY` before it is welcome.
        limits: what it may declare; None before it is welcome.
        refused: of declared messages, why they cannot be read.
        open: the numbers of the declared messages that have come and were not answered.
        since: when it came, or was refused; `introduced`: whether its HELLO is here and waits for its turn.
        asked: when it was asked whether it is still there; `still_here`: when it last said so.
        left: whether it has said goodbye.
        why: why others were told that it is gone; empty while they were not.
        broken: whether its connection has closed.
        process: which process it is in; of no meaning but that it is equal of equal ones.
        timeout: seconds after which it takes a peer that does not answer for lost.
    """

    pair: Pair
    address: str
    sender: Sender = NOBODY
    limits: Limits | None = None
    specs: dict[int, Spec] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)
    introduced: bool = False
    asked: float = 0.0
    still_here: float = 0.0
    left: bool = False
    why: str = ""
    broken: bool = False
    process: str = ""
    timeout: float = 60.0

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"rank {self.sender.worker}"

    @property
    def here(self) -> bool:
        """Whether it is still there."""
        return not (self.left or self.why or self.broken)

    def unanswered(self, now: float) -> float:
        """For how many seconds it has not said whether it is still there."""
        return now - self.asked if self.still_here < self.asked else 0.0


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


@dataclass(frozen=True)
class Doubt:
    """A worker that wants to join, while another process has its place and was asked whether it is there.

    Attributes:
        since: when it was asked; `until`: when it is taken for gone.
    """

    seat: Seat
    header: Header
    hello: Hello
    others: tuple[Seat, ...]
    since: float
    until: float

    @property
    def answer(self) -> Seat | None:
        """One of the others that is still there."""
        return next((each for each in self.others if each.here and each.still_here >= self.since), None)

    @property
    def over(self) -> bool:
        """Whether none of the others is there any more, or none has answered in time."""
        return time.monotonic() > self.until or not any(each.here for each in self.others)


@dataclass
class Waiting:
    """A message that was taken and not answered: since when, and when its worker was last told to wait."""

    header: Header
    since: float
    told: float
    queued: float


class Shard:
    """One bucket: its service, the state of that, and who waits for an answer, by (sender, sequence)."""

    def __init__(self, service: Averager | Keeper, saved: Mapping[str, Any] | None) -> None:
        self.service: Any = service
        self.state: Any = service.start() if saved is None else service.load(saved)
        self.waiting: dict[tuple[Sender, int], Waiting] = {}
