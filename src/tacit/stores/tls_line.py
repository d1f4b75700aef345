"""The bytes of a connection by TLS: one thread receives, and one at a time sends.

OpenSSL forbids that two threads use a connection at once, and a thread that waits inside of it would keep the
other one out. So none waits in OpenSSL, but for the socket, outside of the lock.
"""

from __future__ import annotations

import select
import ssl
import threading
from collections.abc import Sequence

LOOK_SECONDS = 1.0
"""How long a thread waits for bytes before it looks whether the connection was closed meanwhile."""
_RECORD = 1 << 14
"""The most bytes that TLS encrypts together."""


class TlsLine:
    """A connection whose bytes TLS encrypts, record by record."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._tls = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._lock = threading.Lock()
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        connection.setblocking(False)

    def send_now(self, parts: Sequence[memoryview]) -> int:
        """Send what the system has room for, at once; returns how many bytes, or raises BlockingIOError."""
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
        """Wait for room, and send; returns how many bytes of the part."""
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
        """Wait for bytes; returns how many came, 0 at the end. BlockingIOError: none came for a second."""
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
        """Wait until something has come, or the other end is gone; False after so many seconds."""
        with self._lock:
            there = self._tls.pending()
        return bool(there) or bool(self._poll.poll(1000 * seconds))
