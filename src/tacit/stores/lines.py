"""The bytes of a connection, in plain text or by TLS: one thread receives, and one at a time sends.

OpenSSL forbids that two threads use a connection at once, and a thread that waits inside of it would keep the
other one out. So a `TlsLine` never waits in OpenSSL: it waits for the socket, outside of the lock.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

LOOK_SECONDS = 1.0
"""How long a thread waits for bytes before it looks whether the connection was closed meanwhile."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_RECORD = 1 << 14
"""The most bytes that TLS encrypts together."""


class ByteLine(ABC):
    """One end of a connection. A call that would have to wait raises `BlockingIOError`, where it says so.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @abstractmethod
    def send_now(self, parts: Sequence[memoryview]) -> int:
        """Send what the system has room for, at once; returns how many bytes, or raises BlockingIOError."""

    @abstractmethod
    def send(self, part: memoryview) -> int:
        """Wait for room, and send; returns how many bytes of the part."""

    @abstractmethod
    def receive(self, room: memoryview) -> int:
        """Wait for bytes; returns how many came, 0 at the end. BlockingIOError: none came for a second."""

    def ready(self, seconds: float) -> bool:
        """Wait until something has come, or the other end is gone; False after so many seconds."""
        return bool(self._poll.poll(1000 * seconds))

    def set_option(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket, if the system has it."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(level, option, value)

    def drop(self) -> None:
        """End the connection, from any thread; whoever waits for it learns of that."""
        with contextlib.suppress(OSError):
            # Not `SSLSocket.shutdown`: after that, what still lies there would be read as plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, when no other thread uses it any more."""
        self._socket.close()


class PlainLine(ByteLine):
    """A connection whose bytes travel as they are."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.settimeout(None)
        wait = struct.pack("@ll", int(LOOK_SECONDS), int(LOOK_SECONDS % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)

    def send_now(self, parts: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT | _NO_SIGNAL)

    def send(self, part: memoryview) -> int:
        return self._socket.send(part, _NO_SIGNAL)

    def receive(self, room: memoryview) -> int:
        return self._socket.recv_into(room, 0, socket.MSG_WAITALL)


class TlsLine(ByteLine):
    """A connection whose bytes TLS encrypts, record by record."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        super().__init__(connection)
        self._tls = connection
        self._lock = threading.Lock()
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        connection.setblocking(False)

    def send_now(self, parts: Sequence[memoryview]) -> int:
        sent = 0
        for part in parts:
            at = 0
            while at < len(part):
                try:
                    at += self._sent(part[at:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not sent + at:
                        raise BlockingIOError from None
                    return sent + at
            sent += at
        return sent

    def send(self, part: memoryview) -> int:
        while True:
            try:
                return self._sent(part)
            except ssl.SSLWantWriteError:
                self._room.poll(1000 * LOOK_SECONDS)
            except ssl.SSLWantReadError:
                self._poll.poll(1000 * LOOK_SECONDS)

    def _sent(self, part: memoryview) -> int:
        """Of the part's first record; one that did not leave is to be tried again before any other."""
        with self._lock:
            return self._tls.send(part[:_RECORD])

    def receive(self, room: memoryview) -> int:
        for waits in (False, True):
            if waits and not self._poll.poll(1000 * LOOK_SECONDS):
                break
            try:
                with self._lock:
                    return self._tls.recv_into(room)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLWantWriteError:
                self._room.poll(1000 * LOOK_SECONDS)
        raise BlockingIOError

    def ready(self, seconds: float) -> bool:
        with self._lock:
            there = self._tls.pending()
        return bool(there) or super().ready(seconds)


def line_on(connection: socket.socket) -> ByteLine:
    """The line on a socket: by TLS, if that was set up on it."""
    return TlsLine(connection) if isinstance(connection, ssl.SSLSocket) else PlainLine(connection)
