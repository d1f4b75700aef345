"""One connection to a worker, as a server sees it: who it is, what it has declared, and what it is sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tacit.errors import AttachError, PeerLost, ServerLost
from tacit.stores.messages import DeclaredMessage, Hello, MessageSpec
from tacit.stores.protocol import Channel, FrameKind, Header, as_body
from tacit.stores.server.limits import WorkerLimits
from tacit.stores.service import Sender

_log = logging.getLogger("tacit")

NOBODY = Sender(-1, 0)
_REFUSALS = {
    PeerLost: FrameKind.PEER_LOST,
    AttachError: FrameKind.MISFIT,
    ServerLost: FrameKind.DROPPED,
}
_LONGEST_ERROR = 1 << 14
_NO_REPLIES = (FrameKind.WAIT, FrameKind.STILL_HERE)
"""What a server sends of itself, and which answers no message."""


@dataclass(eq=False)
class Connection:
    """A connection that has proved itself, and from its HELLO on, a worker.

    Attributes:
        address: the peer's address.
        sender: the worker and its life; `NOBODY` before it is welcome.
        limits: what it may declare; None before it is welcome.
        declared: its declared messages, by number.
        refused: the reason for each declared message that cannot be read or served.
        parts: of a push that is on its way, by its message's number and the index of their payload.
        open: the numbers of received messages that were not answered.
        since: when it connected, or was refused.
        introduced: whether its HELLO has arrived and waits for its turn.
        asked: when it was asked whether it is still there.
        alive: when it last confirmed that.
        left: whether it has sent LEAVE.
        lost: the reason with which others were told that it is gone; "": they were not.
        closed: whether it has ended.
        process: equal for connections of one process of a worker.
        timeout: seconds after which a peer without an answer counts as lost.
    """

    channel: Channel
    address: str
    sender: Sender = NOBODY
    limits: WorkerLimits | None = None
    declared: dict[int, DeclaredMessage] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    parts: dict[int, dict[int, list[Tensor]]] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)
    introduced: bool = False
    asked: float = 0.0
    alive: float = 0.0
    left: bool = False
    lost: str = ""
    closed: bool = False
    process: str = ""
    timeout: float = 60.0

    @property
    def name(self) -> str:
        """How errors name it."""
        return f"rank {self.sender.worker}"

    @property
    def here(self) -> bool:
        """Whether it takes part."""
        return not (self.left or self.lost or self.closed)

    def unanswered(self, now: float) -> float:
        """The seconds for which it has not confirmed that it is still there."""
        return now - self.asked if self.alive < self.asked else 0.0

    # ---- called by the thread that receives -----------------------------------------------------------

    def note_hello(self) -> None:
        """Its HELLO has come."""
        self.introduced = True

    def note_alive(self, received_at: float) -> None:
        """Note that it is there. If nothing else has come since `received_at`, it counts as silent."""
        self.alive = time.monotonic()
        self.channel.discount(received_at)

    def note_leave(self) -> None:
        """Note that it has sent LEAVE."""
        self.left = True

    def declare(self, number: int, spec: MessageSpec) -> None:
        """Note how messages of this number are read.

        Raises:
            TacitError: they cannot be read; the message says why.
        """
        assert self.limits is not None
        self.limits.check(spec)
        declared = DeclaredMessage(number, spec)
        self.limits.check_size(declared.pushed, declared.pulled)
        self.declared[number] = declared

    def reject(self, number: int, error: Exception) -> None:
        """Refuse messages of this number by the error from now on."""
        self.refused[number] = error

    # ---- called by the server's main thread ----------------------------------------------------------

    def begin_hello(self) -> None:
        """Its HELLO is handled now. If it is refused, the connection may stay for a while."""
        self.introduced, self.since = False, time.monotonic()

    def welcome(self, sender: Sender, hello: Hello) -> None:
        """It is this worker from now on."""
        self.sender, self.process, self.timeout = sender, hello.process, hello.timeout
        self.limits = WorkerLimits(hello.run.model)
        self.channel.set_patience(1.5 * hello.timeout + 5)

    def lose(self, why: str) -> bool:
        """Note that it is gone; returns False where it has left, or this was noted before."""
        if self.left or self.lost:
            return False
        self.lost = why
        return True

    def close(self) -> None:
        """It has ended."""
        self.closed = True

    def free(self) -> None:
        """Give back the memory for its messages."""
        self.declared.clear()

    # ---- sending --------------------------------------------------------------------------------------

    def send(self, header: Header, body: Sequence[Tensor] = ()) -> None:
        """Send a frame, if the connection is there; if it breaks, the receiving thread reports that."""
        if self.closed:
            return
        if header.kind not in _NO_REPLIES:
            self.open.discard(header.spec)
        try:
            self.channel.send(header, body)
        except OSError as error:
            _log.debug("%s: %s", self.name, error)
            self.channel.drop()

    def answer(self, header: Header, text: bytes) -> None:
        """Answer the frame of this header by a text."""
        self.send(header._replace(kind=FrameKind.ANSWER), as_body(text))

    def refuse(self, header: Header, error: Exception) -> None:
        """Answer the frame of this header by an error."""
        kind = next((kind for cls, kind in _REFUSALS.items() if isinstance(error, cls)), FrameKind.REFUSED)
        self.send(header._replace(kind=kind), as_body(str(error).encode(errors="replace")[:_LONGEST_ERROR]))

    def ask_alive(self, now: float | None = None) -> None:
        """Ask whether it is still there; `now`: count from then on for how long it has not answered."""
        self.asked = self.asked if now is None else now
        self.send(Header(FrameKind.STILL_HERE))


@dataclass(frozen=True)
class Arrival:
    """A frame that has come, whole; `at`: when."""

    connection: Connection
    header: Header
    body: Any
    at: float


@dataclass(frozen=True)
class Disconnection:
    """A connection that has ended."""

    connection: Connection
    why: str
