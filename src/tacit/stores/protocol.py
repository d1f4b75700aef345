"""The frames between a worker and a parameter server, and the channel that carries them.

A frame is a header of fixed size, and a body of as many bytes as the header says. The channel is a TCP
connection, perhaps by TLS (`tls_line`), on which both ends have proved that they know the secret
(`handshake`). It is no group of torch.distributed: a program that reaches the port of a TCPStore can read and
change all in it, and Gloo takes the first that connects to one of its ports for its peer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import PayloadError
from tacit.stores.tls_line import LOOK_SECONDS, TlsLine


class FrameKind(IntEnum):
    """The kind of a frame; the first group is sent by workers, the second by servers."""

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
    ASK = 11
    SHARE = 12
    PART = 13
    # from a server
    ANSWER = 20
    WAIT = 21
    PEER_LOST = 22
    REFUSED = 23
    MISFIT = 24
    DROPPED = 25
    STILL_HERE = 26


ALL = -1
"""The number of an error that is about the connection, not about one message."""


class Header(NamedTuple):
    """The fixed part of a frame, which stands before its body.

    Attributes:
        kind: a `FrameKind`.
        spec: the number of the declared message that it is, or answers; negative where it declares one.
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

_CLOSE_SECONDS = 5.0
_LITTLE = 1 << 14
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_MOST_UNSENT = 1 << 16
"""Parts of frames that may wait to be sent; with more, the other end does not read what it is sent."""


class Channel:
    """One end of a connection. One thread receives; any may send, and none waits for the network.

    A thread of the connection sends what the kernel does not take of a frame at once.

    Args:
        connection: a socket on which both ends have proved themselves.

    Attributes:
        received_at: when bytes last came, on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.received_at = time.monotonic()
        self._socket = connection
        self._tls = TlsLine(connection) if isinstance(connection, ssl.SSLSocket) else None
        self._unsent: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._sender: threading.Thread | None = None
        self._closed = False
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        if self._tls is None:
            connection.settimeout(None)
            wait = struct.pack("@ll", int(LOOK_SECONDS), int(LOOK_SECONDS % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_patience(60.0)

    def set_patience(self, seconds: float) -> None:
        """Give the connection up when the other end's machine was out of reach for so long."""
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
        bodies = [*map(_bytes, body)]
        size = sum(map(len, bodies))
        parts = [memoryview(_FORM.pack(*header[:3], size, *header[4:])), *filter(None, bodies)]
        with self._changed:
            if self._closed:
                raise ConnectionError("the connection was closed")
            if not self._unsent:
                parts = self._send_now(parts)
            if not parts:
                return
            if len(self._unsent) > _MOST_UNSENT:
                raise ConnectionError("it reads nothing of what it is sent")
            self._unsent += parts
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_rest, name="tacit-send", daemon=True)
                self._sender.start()
            self._changed.notify_all()

    def _send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Send what the kernel has room for; returns what is left."""
        try:
            if self._tls is not None:
                sent = self._tls.send_now(parts)
            else:
                sent = self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT | _NO_SIGNAL)
        except BlockingIOError:
            return parts
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]
        return parts

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if self._closed:
                    return
                part = self._unsent[0]
            try:
                sent = self._socket.send(part, _NO_SIGNAL) if self._tls is None else self._tls.send(part)
            except OSError:
                self.drop()  # the receiving thread reports it
                return
            with self._changed:
                if self._unsent:
                    if sent < len(part):
                        self._unsent[0] = part[sent:]
                    else:
                        self._unsent.popleft()
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait until all has left, or so many seconds. Returns whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not self._unsent, seconds)

    def keep_back(self) -> None:
        """Have the kernel take in little that it cannot send yet, so that what has left is on its way."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LITTLE)

    # ---- receiving ------------------------------------------------------------------------------------

    def discount(self, received_at: float) -> None:
        """Count what has come since `received_at` as silence."""
        self.received_at = received_at

    def ready(self, seconds: float) -> bool:
        """Wait until something has come, or the other end is gone; False after so many seconds."""
        return bool(self._poll.poll(1000 * seconds)) if self._tls is None else self._tls.ready(seconds)

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
        """Wait for so many bytes, and forget them."""
        room = memoryview(bytearray(min(size, 1 << 16)))
        while size:
            part = room[: min(size, len(room))]
            self._fill(part, None)
            size -= len(part)

    def _fill(self, room: memoryview, seconds: float | None) -> None:
        since = time.monotonic()
        while room:
            try:
                if self._tls is not None:
                    got = self._tls.receive(room)
                else:
                    got = self._socket.recv_into(room, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing came since it last was looked
                if self._closed:
                    raise ConnectionError("the connection was closed") from None
                if seconds is not None and time.monotonic() - since > seconds:
                    raise TimeoutError(f"nothing came for {seconds:g} s") from None
                continue
            if not got:
                raise ConnectionError("connection closed by peer")
            since = self.received_at = time.monotonic()
            room = room[got:]

    # ---- the end --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """End the connection, so that the other end knows, and whoever waits here; from any thread."""
        with self._changed:
            self._closed = True
            self._unsent.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            # Not `SSLSocket.shutdown`: after that, what still lies there would be read as plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; to be called by the thread that receives, when it has ended."""
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
