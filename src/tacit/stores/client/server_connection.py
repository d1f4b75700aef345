"""A worker's connection to one parameter server: it sends messages, and receives the replies."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import AxisRank, PayloadSpec, Posted, PushPull
from tacit.errors import AttachError, PayloadError, PeerLost, ServerLost, first_line
from tacit.stores import encoding
from tacit.stores.client import chunking
from tacit.stores.client.connecting import open_channel
from tacit.stores.messages import (
    DeclaredMessage,
    Hello,
    MessageSpec,
    PayloadBuffer,
    RunSpec,
    Welcome,
)
from tacit.stores.protocol import ALL, FrameKind, Header, as_body
from tacit.stores.secret import Secret
from tacit.stores.tls import TlsWorker
from tacit.transports.meter import like

_LEAVE_SECONDS = 10.0
_PROCESS = uuid.uuid4().hex
"""Joined with the process's number: a number alone may come back in a container that is started again."""

_ERRORS = {
    FrameKind.PEER_LOST: PeerLost,
    FrameKind.REFUSED: PayloadError,
    FrameKind.MISFIT: AttachError,
    FrameKind.DROPPED: ServerLost,
}
_ALL_KINDS = frozenset(FrameKind)
_FROM_SERVERS = {encoding.name_of(Welcome): Welcome}
_LOOK_SECONDS = 1.0
KINDS = {"push": FrameKind.PUSH, "pull": FrameKind.PULL, "meet": FrameKind.MEET}
"""How each `PushPull.do` is asked for."""


@dataclass(eq=False)
class PendingReply(Posted):
    """The reply to a frame that was sent; `contracts.Posted`.

    Attributes:
        buffer: receives its payloads; None: its body is text.
        sent: the bytes of the payloads that were sent.
        header: the header of the reply.
        found: its payloads or its text.
        error: the error in place of a reply.
        done: whether there is a reply or an error.
    """

    buffer: PayloadBuffer | None
    sent: int = 0
    header: Header | None = None
    found: Any = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    _call: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._call = call
            now = self.done.is_set()
        if now:
            call()

    def end(
        self, found: Any = None, header: Header | None = None, error: BaseException | None = None
    ) -> None:
        """Note the reply or the error; only the first call counts."""
        with self._lock:
            if self.done.is_set():
                return
            self.found, self.header, self.error = found, header, error
            self.done.set()
            call = self._call
        if call is not None:
            call()

    def answer(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.found


@dataclass
class ClientCounters:
    """What a worker has sent and got.

    Attributes:
        pushes: how many; `pushed`, the bytes of these and of other messages.
        pulled: bytes of payloads that came back.
        stale: the sum of how many updates each push was old.
        queued: seconds that its messages have waited for their turn in the server.
    """

    pushes: int = 0
    pushed: int = 0
    pulled: int = 0
    stale: int = 0
    queued: float = 0.0

    def sent(self, header: Header, body: Sequence[Tensor]) -> None:
        """Count a message."""
        self.pushes += header.kind == FrameKind.PUSH
        self.pushed += sum(map(Tensor.numel, body))

    def got(self, header: Header) -> None:
        """Count a reply with payloads."""
        self.pulled += header.nbytes
        self.stale += header.stale
        self.queued += header.queued / 1e6


class ServerClient:
    """A connection to one server. Any thread may send; a separate thread receives the replies.

    Args:
        number: the number of the server.
        address: its host and port.
        me: the number of this worker, and of all workers.
        timeout: after which a peer that does not answer is lost. A worker waits longer for a server, which
            waits for other workers and says who is missing.
        run: the description of the run, equal on all workers; the server may refuse it.
        secret: that server and workers share.
        tls: which certificates are trusted; None: the server speaks no TLS.

    Raises:
        ServerLost: it cannot be reached.
        AttachError: it is not trusted, has another secret or version, or serves another model, strategy or
            number of workers.
    """

    def __init__(
        self,
        number: int,
        address: tuple[str, int],
        me: AxisRank,
        timeout: timedelta,
        run: RunSpec,
        secret: Secret,
        tls: TlsWorker | None = None,
    ) -> None:
        self.name = f"server {number} ({address[0]}:{address[1]})"
        self.counters = ClientCounters()
        self._patience = 1.5 * timeout.total_seconds() + 5
        self._failure: BaseException | None = None
        self._declared: dict[tuple[Any, ...], DeclaredMessage] = {}
        self._latest: dict[str, DeclaredMessage] = {}
        """The last push of each bucket; most often the next one has the very same pieces and pulls."""
        self._clocks: dict[str, int] = {}
        self._joined: dict[str, Tensor] = {}
        self._open: dict[int, PendingReply] = {}
        self._opened = 0.0
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._channel = open_channel(address, secret, self._patience, self.name, tls)
        self._channel.set_patience(self._patience)
        self._thread = threading.Thread(target=self._listen, name="tacit-pull", daemon=True)
        self._thread.start()
        process = f"{_PROCESS}/{os.getpid()}"
        hello = Hello(me.rank, me.peers, number, process, timeout.total_seconds(), run)
        try:
            welcome = encoding.read(self.call(FrameKind.HELLO, encoding.write(hello)), Welcome, _FROM_SERVERS)
        except BaseException as error:
            self.abort(error)
            raise
        self._clocks |= welcome.clocks

    # ---- messages -------------------------------------------------------------------------------------

    def post_long(self, request: PushPull, key: str) -> Posted:
        """Send a request to the averaging service of the bucket `key`; a long push in chunks."""
        latest = self._latest.get(key)
        known = latest is not None and latest.spec.pieces is request.pieces  # which was sent whole
        i = None if known else chunking.long_piece(request)
        if i is None:
            return self.post(request, key)
        if key not in self._joined:
            self._joined[key] = torch.empty_like(like(request.pulls[i])[0], device="cpu")
        whole = self._joined[key]
        parts = [
            self.post(chunking.chunk(request, i, a, b), f"{key}/{a}", whole[a:b])
            for a, b in chunking.spans(request.pieces[i])
        ]
        others = len(request.pieces) > 1
        if others:
            parts.append(self.post(chunking.rest(request, i), f"{key}/rest"))
        return chunking.JoinedReply(parts, i, whole, others)

    def post(self, request: PushPull, key: str, into: Tensor | None = None) -> PendingReply:
        """Send a request to the service of the bucket `key`; `into`: where the reply's bytes are to lie."""
        kind, sequence, declared = KINDS[request.do], 0, None
        if kind == FrameKind.PUSH:
            sequence = self._clocks[key] = self._clocks.get(key, 0) + 1
            declared = self._latest.get(key)
        pieces, pulls = request.pieces, request.pulls
        if declared is None or declared.spec.pieces is not pieces or declared.spec.pulls is not pulls:
            declared = self._declare(kind, MessageSpec(key, pieces, pulls))
            if kind == FrameKind.PUSH:
                self._latest[key] = declared
        if into is not None:
            declared.pulled.use(into)
        if request.seconds is not None:
            reply = PendingReply(declared.pulled, declared.pushed.nbytes)
            self._channel.keep_back()
            call = partial(self._post_in_parts, request, declared, sequence, reply)
            threading.Thread(target=call, name="tacit-parts", daemon=True).start()
            return reply
        header, body = declared.frame(kind, sequence, request.payloads, request.lr)
        self.counters.sent(header, body)
        return self._send(header, body, PendingReply(declared.pulled, declared.pushed.nbytes))

    def _post_in_parts(
        self, request: PushPull, declared: DeclaredMessage, sequence: int, reply: PendingReply
    ) -> None:
        """Send parts until the request's seconds are over, then the push; of each payload at least one."""
        assert request.seconds is not None
        ends = time.monotonic() + request.seconds
        for i, (piece, payload) in enumerate(zip(request.pieces, request.payloads, strict=True)):
            if piece.codec is None or not piece.codec.partial:
                continue
            left: list[Tensor] = []
            for part in piece.codec.message_parts(payload, piece.numel):
                if left and not self._channel.drain(max(0.0, ends - time.monotonic())):
                    break
                header = Header(FrameKind.PART, declared.number, i)
                self.counters.sent(header, [part])
                self._frame(header, [part])
                left.append(part)
            piece.codec.restore_(torch.cat([torch.empty(0, dtype=torch.uint8), *left]), piece.numel, payload)
        header, body = declared.frame(FrameKind.PUSH, sequence, request.payloads, request.lr, ahead=True)
        self.counters.sent(header, body)
        self._send(header, body, reply)

    def enter(self, x: Tensor, key: str, back: PayloadSpec) -> Tensor:
        """Begin with the bucket `key`, whose parameters are `x`; returns a copy of what the server has."""
        whole = PayloadSpec(None, x.numel(), x.dtype)
        declared = self._declare(FrameKind.MEET, MessageSpec(key, (), (whole,), back))
        for kind, payloads in ((FrameKind.ENTER, ()), (FrameKind.OFFER, ((x,),))):
            frame = declared.frame(kind, payloads=payloads)
            reply = self._wait(self._send(*frame, PendingReply(declared.pulled)))
            assert reply.header is not None
            if reply.header.nbytes:
                self._clocks[key] = reply.header.sequence
                found: Tensor = reply.found[0][0]
                return found.clone()
        raise AssertionError(f"{self.name} did not send the parameters of {key}")

    def clock(self, key: str) -> int:
        """How many pushes to the bucket `key` the worker has made, over all of its lives."""
        return self._clocks.get(key, 0)

    def call(self, kind: FrameKind, text: bytes = b"") -> bytes:
        """Send a frame that is about no bucket, and wait for its reply."""
        found: bytes = self._wait(self._send(Header(kind), as_body(text), PendingReply(None))).found
        return found

    def _wait(self, reply: PendingReply) -> PendingReply:
        reply.done.wait()
        reply.answer()
        return reply

    def _declare(self, kind: FrameKind, spec: MessageSpec) -> DeclaredMessage:
        """The message that the server knows by this key, kind and form; declares it, the first time."""
        known = (spec.key, kind, spec.pieces, spec.pulls)
        if known not in self._declared:
            number = len(self._declared) + 1
            self._frame(Header(FrameKind.DECLARE, -number), as_body(encoding.write(spec)))
            self._declared[known] = DeclaredMessage(number, spec)
        return self._declared[known]

    def _send(self, header: Header, body: Sequence[Tensor], reply: PendingReply) -> PendingReply:
        with self._changed:
            assert header.spec not in self._open, f"{self.name} was asked twice at once"
            self._opened = self._opened if self._open else time.monotonic()
            self._open[header.spec] = reply
        self._frame(header, body)
        return reply

    def _frame(self, header: Header, body: Sequence[Tensor]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._channel.send(header, body)
        except BaseException as error:
            self.abort(self._lost(error))

    # ---- replies --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Receive replies until the connection ends, or nothing comes for too long while some are due."""
        try:
            while True:
                while not self._channel.ready(_LOOK_SECONDS):
                    received_at = max(self._channel.received_at, self._opened)
                    if self._open and time.monotonic() - received_at > self._patience:
                        raise TimeoutError
                self._hear()
        except BaseException as error:
            if not self._closing:
                self.abort(self._lost(error))
        finally:
            self._channel.close()

    def _hear(self) -> None:
        header = self._channel.header(self._patience)
        if header.kind == FrameKind.WAIT:
            return
        if header.kind == FrameKind.STILL_HERE:
            self._channel.send(Header(FrameKind.HERE))
            return
        reply = self._open.get(header.spec)
        found: Any
        if (
            header.kind == FrameKind.ANSWER
            and reply is not None
            and reply.buffer is not None
            and header.nbytes
        ):
            least, most = reply.buffer.least, reply.buffer.most
            if not least <= header.nbytes <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                raise PayloadError(f"it answered {header.nbytes} bytes, where {wanted} were asked")
            self._channel.body(reply.buffer.room(header.nbytes), self._patience)
            reply.buffer.arrived()
            found, error = reply.buffer.unpack(), None
            self.counters.got(header)
        else:
            found = self._channel.text(header, encoding.MOST_BYTES, self._patience)
            kind = _ERRORS.get(FrameKind(header.kind)) if header.kind in _ALL_KINDS else None
            says = f"{self.name} has refused a message: " if kind is PayloadError else ""
            error = None if kind is None else kind(says + found.decode(errors="replace"))
            if error is not None and header.spec == ALL:
                raise error
        with self._changed:
            self._open.pop(header.spec, None)
        if reply is not None:
            reply.end(found, header, error)

    def _lost(self, error: BaseException) -> BaseException:
        if self._failure is not None:
            return self._failure
        if isinstance(error, ServerLost):
            return ServerLost(f"{self.name} has ended the connection: {error}")
        if isinstance(error, TimeoutError) and error.errno is None:
            return ServerLost(f"{self.name} sent nothing for {self._patience:g} s: it is gone or frozen")
        return ServerLost(f"{self.name} is gone: {first_line(error)}")

    def abort(self, error: BaseException) -> None:
        """End the connection: all pending replies are this error, and all later ones."""
        self._failure = self._failure or error
        with self._changed:
            replies, self._open, self._closing = [*self._open.values()], {}, True
        for each in replies:
            each.end(error=self._failure)
        self._channel.drop()

    def close(self) -> None:
        """Send a LEAVE, if the server is there, and end the connection; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._send(Header(FrameKind.LEAVE), (), PendingReply(None)).done.wait(_LEAVE_SECONDS)
        self._closing = True
        self._channel.drop()
        self._thread.join(_LEAVE_SECONDS)
