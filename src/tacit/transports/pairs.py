"""One worker and one parameter server: a connection between them, and the frames that travel on it.

A frame is a header of fixed size, and a body of as many bytes as the header says. The connection is a TCP
socket of our own on which both ends have proved themselves (`handshake`), and not a group of
torch.distributed: whoever reaches the port of a TCPStore can read and change all in it, and Gloo takes
the first that connects to one of its ports for the peer it waits for.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.contracts import Payload, PayloadSpec
from tacit.errors import PayloadError
from tacit.transports.meter import like
from tacit.transports.wire import nbytes, pack_, unpack


class Kind(IntEnum):
    """What a frame is."""

    # from a worker
    HELLO = 1
    DECLARE = 2
    ENTER = 3
    OFFER = 4
    PUSH = 5
    PULL = 6
    MEET = 7
    STATS = 8
    LEAVE = 9
    HERE = 10
    # from a server
    ANSWER = 20
    WAIT = 21
    PEER_LOST = 22
    REFUSED = 23
    MISFIT = 24
    DROPPED = 25
    STILL_HERE = 26


ALL = -1
"""In place of a message's number: what an error is about when it is about all of them."""


class Header(NamedTuple):
    """What stands before a body.

    Attributes:
        spec: which declared message it is, or answers.
        sequence: the worker's number of the message that it is, or answers.
        nbytes: of the body.
        lr: the learning rate of a push.
        stale: of an answer, how many others' pushes had been applied since the worker pulled.
        queued: of an answer, how many microseconds the message has waited for its turn.
    """

    kind: int
    spec: int = 0
    sequence: int = 0
    nbytes: int = 0
    lr: float = 0.0
    stale: int = 0
    queued: int = 0


_FORM = struct.Struct("<4qd2q")

_LOOK_SECONDS = 1.0
"""How often whoever waits for bytes comes back to see whether it still is to."""
_CLOSE_SECONDS = 5.0
_MOST_LEAVING = 1 << 16
"""Parts of frames that may wait to leave; at more, the other end does not read what it is sent."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Pair:
    """One end of a connection. One thread receives; any may send, and none waits for the network.

    What the kernel does not take of a frame at once, a thread of the connection's own sends on.

    Args:
        connection: on which both ends have proved themselves.

    Attributes:
        heard: when bytes last came.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.heard = time.monotonic()
        self._socket = connection
        self._leaving: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._sender: threading.Thread | None = None
        self._closed = False
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wait = struct.pack("@ll", int(_LOOK_SECONDS), int(_LOOK_SECONDS % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self.be_patient(60.0)

    def be_patient(self, seconds: float) -> None:
        """How long the other end's machine may be out of reach before the connection is given up."""
        options = self._socket.setsockopt
        options(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each = min(30_000, max(1, int(seconds / 4)))
        for name, value in (
            ("TCP_KEEPIDLE", each),
            ("TCP_KEEPINTVL", each),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", min(2**31 - 1, int(1000 * seconds))),
        ):
            if hasattr(socket, name):  # not every system has all of them
                with contextlib.suppress(OSError):
                    options(socket.IPPROTO_TCP, getattr(socket, name), value)

    # ---- sending --------------------------------------------------------------------------------------

    def send(self, header: Header, body: Sequence[Tensor] = ()) -> None:
        """Send a frame; its body, bytes, must stay as it is until the other end has answered.

        Raises:
            ConnectionError: the other end is gone, or reads nothing of what it is sent.
        """
        size = sum(part.numel() for part in body)
        parts = [memoryview(_FORM.pack(*header._replace(nbytes=size)))]
        parts += [_bytes(part) for part in body if part.numel()]
        with self._changed:
            if self._closed:
                raise ConnectionError("the connection was closed")
            if not self._leaving:
                parts = self._at_once(parts)
            if not parts:
                return
            if len(self._leaving) > _MOST_LEAVING:
                raise ConnectionError("it reads nothing of what it is sent")
            self._leaving += parts
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_on, name="tacit-send", daemon=True)
                self._sender.start()
            self._changed.notify_all()

    def _at_once(self, parts: list[memoryview]) -> list[memoryview]:
        """What is left of them when the kernel has taken what it has room for."""
        try:
            sent = self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT | _NO_SIGNAL)
        except BlockingIOError:
            return parts
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]
        return parts

    def _send_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leaving or self._closed)
                if self._closed:
                    return
                part = self._leaving[0]
            try:
                sent = self._socket.send(part, _NO_SIGNAL)
            except OSError:
                self.drop()  # whoever receives says so
                return
            with self._changed:
                if self._leaving:
                    if sent < len(part):
                        self._leaving[0] = part[sent:]
                    else:
                        self._leaving.popleft()
                self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """Wait until all has left, or so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._leaving, seconds)

    # ---- receiving ------------------------------------------------------------------------------------

    def ready(self, seconds: float) -> bool:
        """Wait until something has come, or the other end is gone; False after so many seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def header(self, seconds: float | None = None) -> Header:
        """Wait for the next frame's header; see `body`."""
        head = bytearray(_FORM.size)
        self._fill(memoryview(head), seconds)
        return Header(*_FORM.unpack(head))

    def body(self, into: Tensor, seconds: float | None = None) -> None:
        """Wait for bytes, however slowly they come; for the first and after each other at most `seconds`.

        Raises:
            ConnectionError: the other end is gone.
            TimeoutError: nothing came for so long.
        """
        if into.numel():
            self._fill(_bytes(into), seconds)

    def text(self, header: Header, most: int, seconds: float | None = None) -> bytes:
        """Wait for a body that is no payload.

        Raises:
            PayloadError: it would have more than `most` bytes, or fewer than none.
        """
        if not 0 <= header.nbytes <= most:
            raise PayloadError(f"a text of {header.nbytes} bytes, where at most {most} belong")
        whole = bytearray(header.nbytes)
        self._fill(memoryview(whole), seconds)
        return bytes(whole)

    def skip(self, size: int) -> None:
        """Let so many bytes come, and forget them."""
        room = memoryview(bytearray(min(size, 1 << 16)))
        while size:
            part = room[: min(size, len(room))]
            self._fill(part, None)
            size -= len(part)

    def _fill(self, room: memoryview, seconds: float | None) -> None:
        since = time.monotonic()
        while room:
            try:
                got = self._socket.recv_into(room, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing came since it last was looked
                if self._closed:
                    raise ConnectionError("the connection was closed") from None
                if seconds is not None and time.monotonic() - since > seconds:
                    raise TimeoutError(f"nothing came for {seconds:g} s") from None
                continue
            if not got:
                raise ConnectionError("connection closed by peer")
            since = self.heard = time.monotonic()
            room = room[got:]

    # ---- the end --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """End the connection, so that the other end knows, and whoever waits here; from any thread."""
        with self._changed:
            self._closed = True
            self._leaving.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give it back to the system, once nobody receives any more."""
        self.drop()
        if self._sender not in (None, threading.current_thread()):
            assert self._sender is not None
            self._sender.join(_CLOSE_SECONDS)
        self._socket.close()


def _bytes(x: Tensor) -> memoryview:
    """The memory of a uint8 tensor."""
    whole: Any = x.detach().numpy()
    return memoryview(whole)


def as_body(text: bytes) -> list[Tensor]:
    """Bytes as the body of a frame."""
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []


# ---- payloads -----------------------------------------------------------------------------------------


class Parcel:
    """Payloads as one body, in a buffer that is kept.

    Args:
        pieces: how each of them is read.
    """

    def __init__(self, pieces: Sequence[PayloadSpec]) -> None:
        self._likes = [like(piece) for piece in pieces]
        self._flat: Payload = tuple(part for each in self._likes for part in each)
        self.nbytes = nbytes(self._flat)
        self._buffer: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The kept bytes."""
        if self._buffer is None:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        return self._buffer

    def lie_in(self, x: Tensor) -> None:
        """Keep the bytes in this contiguous tensor from now on."""
        assert x.numel() * x.element_size() == self.nbytes
        self._buffer = x.view(-1).view(torch.uint8)

    def pack(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """The body; a single tensor goes as it lies in memory, with no copy."""
        flat = tuple(part for payload in payloads for part in payload)
        if nbytes(flat) != self.nbytes:
            raise AssertionError(f"payloads of {nbytes(flat)} bytes, where {self.nbytes} were declared")
        if len(flat) == 1 and flat[0].is_contiguous():
            return [flat[0].view(-1).view(torch.uint8)]
        pack_(flat, self.buffer)
        return [self.buffer]

    def unpack(self) -> tuple[Payload, ...]:
        """The payloads that lie in the buffer, as views."""
        flat = iter(unpack(self.buffer, self._flat))
        return tuple(tuple(next(flat) for _ in each) for each in self._likes)
