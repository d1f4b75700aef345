"""Two ranks' ends of a channel: one asks for averages, the other answers, in a separate thread.

A bucket travels in chunks, and each is answered on arrival, so that answers come back while the next chunk is
sent. The header of a chunk has the number of its bucket, and where it begins there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.errors import PayloadError, PeerLost, first_line
from tacit.stores.pairs.transport import PairLink, PairTransport
from tacit.stores.protocol import Channel, FrameKind, Header, as_body

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_LONGEST = 1 << 12
"""The most bytes of a rank's reason for leaving."""
CHUNK = 1 << 17
"""Entries that travel together."""
Reply = Callable[[Tensor | None], None]


class _End(PairLink, ABC):
    """One end of a channel between two ranks.

    Args:
        rank: the rank at the other end.
        channel: the connection, whose ends have proved themselves.
        store: has the buckets that are averaged, and is notified if the rank is gone.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, rank: int, channel: Channel, store: PairTransport, timeout: float) -> None:
        self.rank = rank
        self._channel, self._store, self._timeout = channel, store, timeout
        self._closing = self._left = False
        channel.set_patience(1.5 * timeout + 5)
        self._thread = threading.Thread(target=self._run, name="tacit-pair", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self, settled: bool, why: str = "") -> None:
        if (settled or why) and not self._closing:
            kind = FrameKind.LEAVE if settled else FrameKind.PEER_LOST
            with contextlib.suppress(OSError):
                self._channel.send(Header(kind), as_body(why.encode(errors="replace")[:_LONGEST]))
                self._channel.drain(_CLOSE_SECONDS)
        self._closing = True
        self._channel.drop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        why = ""
        try:
            while not self._left:
                if self._channel.ready(_LOOK_SECONDS):
                    self._hear(self._channel.header(self._timeout))
                self._look()
        except Exception as error:
            why = first_line(error)
        finally:
            self._channel.close()
        if why and not self._closing:
            self._store.lose(self.rank, why)
        self._ended()

    def _hear(self, header: Header) -> None:
        if header.kind == FrameKind.LEAVE:
            self._left = True
            return
        if header.kind == FrameKind.PEER_LOST:
            raise PeerLost(self._channel.text(header, _LONGEST, self._timeout).decode(errors="replace"))
        expected = self._kind()
        if header.kind != expected or not 0 <= header.spec < len(self._store.store.keys):
            raise PayloadError(f"it sent a frame of kind {header.kind}, where {expected.name} was expected")
        self._take(header)

    def _body(self, header: Header, whole: Tensor) -> Tensor:
        """The chunk that a header announces, as it lies in the bucket."""
        if header.sequence % CHUNK or not 0 <= header.sequence < max(1, whole.numel()):
            raise PayloadError(f"it sent parameters from {header.sequence} on, of {whole.numel()}")
        into = whole[header.sequence : header.sequence + CHUNK]
        size = into.numel() * into.element_size()
        if header.nbytes != size:
            raise PayloadError(f"it sent {header.nbytes} bytes of parameters, where {size} were expected")
        self._channel.body(into.view(torch.uint8), self._timeout)
        return into

    @abstractmethod
    def _kind(self) -> FrameKind:
        """The only kind of frame that comes."""

    @abstractmethod
    def _take(self, header: Header) -> None:
        """Such a frame has come, but for its body."""

    def _look(self) -> None:
        """Called once a second at least."""

    def _ended(self) -> None:
        """Called when nothing comes any more."""


@dataclass(eq=False)
class _Asked:
    """What was asked; `missing`: the chunks that are not answered, since when."""

    reply: Reply
    missing: set[int]
    since: float

    def over(self, start: int) -> bool:
        """Note that this chunk is answered; returns whether all are."""
        self.missing.discard(start)
        self.since = time.monotonic()
        return not self.missing


class AskingLink(_End):
    """Asks a rank for averages; each bucket has one under way at most."""

    def __init__(self, rank: int, channel: Channel, store: PairTransport, timeout: float) -> None:
        super().__init__(rank, channel, store, timeout)
        self._asked: dict[int, _Asked] = {}
        self._moved: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._over = False

    def ask(self, number: int, x: Tensor, reply: Reply) -> None:
        if number not in self._moved:
            self._moved[number] = torch.empty_like(x)
        starts = range(0, max(1, x.numel()), CHUNK)
        with self._lock:
            over = self._over
            if not over:
                self._asked[number] = _Asked(reply, {*starts}, time.monotonic())
        if over:
            self._store.lose(self.rank, "it has closed its session")
            reply(None)
            return
        try:
            for start in starts:
                chunk = x[start : start + CHUNK].view(torch.uint8)
                self._channel.send(Header(FrameKind.PUSH, number, start), [chunk])
        except OSError:
            self._channel.drop()  # the receiving thread reports that, and answers

    def _kind(self) -> FrameKind:
        return FrameKind.ANSWER

    def _take(self, header: Header) -> None:
        with self._lock:
            asked = self._asked.get(header.spec)
        if asked is None or header.sequence not in asked.missing:
            raise PayloadError("it answered what was not asked")
        self._body(header, self._moved[header.spec])
        with self._lock:
            if not asked.over(header.sequence):
                return
            del self._asked[header.spec]
        asked.reply(self._moved[header.spec])

    def _look(self) -> None:
        with self._lock:
            since = min((each.since for each in self._asked.values()), default=None)
        if since is not None and time.monotonic() - since > self._timeout:
            raise TimeoutError(f"it did not answer within {self._timeout:g} s")

    def _ended(self) -> None:
        with self._lock:
            self._over, asked, self._asked = True, [*self._asked.values()], {}
        if asked and self._left:
            self._store.lose(self.rank, "it has closed its session")
        for each in asked:
            each.reply(None)


class AnsweringLink(_End):
    """Answers what a rank asks."""

    def __init__(self, rank: int, channel: Channel, store: PairTransport, timeout: float) -> None:
        super().__init__(rank, channel, store, timeout)
        self._theirs: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}

    def ask(self, number: int, x: Tensor, reply: Reply) -> None:
        raise AssertionError("it only answers")

    def _kind(self) -> FrameKind:
        return FrameKind.PUSH

    def _take(self, header: Header) -> None:
        number = header.spec
        if number not in self._theirs:
            self._theirs[number], self._moved[number] = self._store.like(number), self._store.like(number)
        start, theirs = header.sequence, self._body(header, self._theirs[number])
        moved = self._store.answer(number, theirs, self._moved[number][start : start + CHUNK], start)
        self._channel.send(Header(FrameKind.ANSWER, number, start), [moved.view(torch.uint8)])
