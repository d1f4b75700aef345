"""The listening socket of a parameter server, which lets workers in and keeps strangers out.

A stranger is a connection that has not proved that it knows the secret. One thread serves all of them. Each
has a fixed number of bytes to send, and a time for it. There are at most so many: when one more comes,
the oldest is closed. Nothing that a stranger sends is parsed but by OpenSSL, where there is TLS, and nothing
that it does ends the thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from tacit.errors import ConfigError
from tacit.stores import handshake
from tacit.stores.handshake import Verdict
from tacit.stores.protocol import Channel
from tacit.stores.secret import Secret
from tacit.stores.tls import ALERT, SPOKE_PLAIN, SPOKE_TLS, TlsServer, why_refused

_log = logging.getLogger("tacit")

MOST_STRANGERS = 128
_BACKLOG = 512
_AT_ONCE = 64
"""Connections that are taken in before those that are there have their turn again."""
_LOOK_SECONDS = 0.2
_SILENT_SECONDS = 3.0
"""After which one that says nothing is told that there is TLS here: its end speaks first, in plain text ours.
"""
_MOST_HOSTS = 256
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RejectionLog:
    """Logs from where a connection was closed, and why: the first time, then the 10th, the 100th ..."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def note(self, address: str, why: str) -> None:
        """Note that a connection from `address` (host:port) was closed."""
        host = address.rpartition(":")[0]
        with self._lock:
            host = host if host in self._counts or len(self._counts) < _MOST_HOSTS else "other addresses"
            count = self._counts[host] = self._counts.get(host, 0) + 1
        if count == 1:
            _log.warning("a connection from %s was closed: %s", address, why)
        elif str(count).strip("0") == "1":
            _log.warning("%d connections from %s were closed, the last (%s): %s", count, host, address, why)


@dataclass(eq=False)
class _Stranger:
    """A connection that has not proved itself.

    Attributes:
        silent_until: when it is told that there is TLS here, if it has said nothing by then.
        greeted: whether the server has greeted it, which it does as soon as TLS is set up.
        shown: the fingerprint of the certificate that it has shown.
    """

    connection: socket.socket
    address: str
    greeting: bytes
    until: float
    silent_until: float
    greeted: bool = False
    shown: str = ""
    got: bytes = field(default=b"")

    def add(self, part: bytes) -> None:
        """Note what it has sent."""
        self.got += part

    def spoke(self) -> None:
        """Note that it has said something."""
        self.silent_until = self.until

    def greet(self, shown: str) -> None:
        """Send the greeting; `shown`: see the class."""
        self.greeted, self.shown = True, shown
        self.connection.send(self.greeting)


class Listener:
    """Listens for connections, and passes on those that know the secret.

    Args:
        host: the address to listen on; one of this machine, or 0.0.0.0 (or ::) for all of them.
        port: 0 for any that is free.
        admit: gets the channel and the peer's address; called in the listener's thread.
        rejections: logs closed connections.
        tls: its certificate, and those that others must show; None: plain text.

    Raises:
        ConfigError: it cannot listen there; the message says why.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        admit: Callable[[Channel, str], None],
        rejections: RejectionLog,
        tls: TlsServer | None = None,
    ) -> None:
        self._tls = tls
        self._shown: weakref.WeakKeyDictionary[Channel, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._listener = _listening_socket(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._secret, self._admit, self._complaints = secret, admit, rejections
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tacit-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and wait until the thread has ended."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._look()
            except Exception as error:  # whatever was sent: the next connection may be a worker's
                _log.error("the listener: %s: %s", type(error).__name__, error)
                time.sleep(_LOOK_SECONDS)
        for stranger in [*self._strangers.values()]:
            self._forget(stranger)
        self._selector.close()
        self._listener.close()

    def _look(self) -> None:
        for key, _ in self._selector.select(_LOOK_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._strangers.values():
                self._hear(key.data)
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.silent_until < now]:
            if self._tls is None or stranger.silent_until == stranger.until:
                self._refuse(stranger, f"it did not prove itself within {handshake.SECONDS:g} s")
            else:
                with contextlib.suppress(OSError):
                    socket.socket.send(stranger.connection, ALERT)
                self._refuse(stranger, SPOKE_PLAIN)
        if self._tls is not None:
            self._renew(self._tls)

    def _renew(self, tls: TlsServer) -> None:
        """End the connections of those whose certificates were taken out of the file."""
        try:
            renewed = tls.renew()
        except (ConfigError, OSError) as error:
            _log.error("%s; those that it had before hold on", error)
            return
        for channel, (shown, address) in [*self._shown.items()] if renewed else ():
            if not tls.admits(shown):
                _log.warning("%s is sent away: its certificate may not connect any more", address)
                channel.drop()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # it was gone again
                if not self._strangers:
                    time.sleep(_LOOK_SECONDS)
                    return
                self._make_room("this process can have no more open files")
                continue
            self._greet(connection, f"{address[0]}:{address[1]}")

    def _greet(self, connection: socket.socket, address: str) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._make_room(f"{MOST_STRANGERS} others came that had not proved themselves either")
        now = time.monotonic()
        until = silent = now + handshake.SECONDS
        connection.setblocking(False)
        if self._tls is not None:
            try:
                connection = self._tls.begin(connection)
            except OSError:
                connection.close()  # it was gone again
                return
            silent = now + min(_SILENT_SECONDS, handshake.SECONDS / 2)
        stranger = _Stranger(connection, address, handshake.greeting(), until, silent)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        try:
            if self._tls is None:
                stranger.greet("")
        except OSError as error:
            self._refuse(stranger, str(error.strerror or error))

    def _make_room(self, why: str) -> None:
        self._refuse(next(iter(self._strangers.values())), why)

    def _set_up(self, stranger: _Stranger, tls: TlsServer) -> None:
        """Go on with TLS, and greet it when that is done."""
        connection = stranger.connection
        assert isinstance(connection, ssl.SSLSocket)
        stranger.spoke()
        try:
            connection.do_handshake()
            shown = tls.shown(connection)
            if tls.admits(shown):
                stranger.greet(shown)
            else:
                self._refuse(stranger, f"its certificate, {shown}, is none of those that may connect")
        except ssl.SSLWantReadError:
            self._selector.modify(connection, selectors.EVENT_READ, stranger)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, stranger)
        except ssl.SSLEOFError:
            self._forget(stranger)
        except OSError as error:
            self._refuse(stranger, why_refused(error))

    def _hear(self, stranger: _Stranger) -> None:
        if not stranger.greeted and self._tls is not None:
            self._set_up(stranger, self._tls)
            return
        try:
            part = stranger.connection.recv(handshake.REPLY_BYTES - len(stranger.got))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._refuse(stranger, str(error.strerror or error))
            return
        stranger.add(part)
        if not stranger.got:
            self._forget(stranger)  # it has only looked whether there is somebody
        elif not part:
            self._refuse(stranger, "it went away before it had proved itself")
        elif not handshake.may_be(stranger.got):
            tls = stranger.got.startswith(b"\x16") and self._tls is None
            self._refuse(stranger, SPOKE_TLS if tls else handshake.REASONS[Verdict.NO_WORKER])
        elif len(stranger.got) == handshake.REPLY_BYTES:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        verdict, message = handshake.judged(self._secret, stranger.greeting, stranger.got)
        with contextlib.suppress(OSError):
            stranger.connection.send(message)
        if verdict is not Verdict.WELCOME:
            self._refuse(stranger, handshake.REASONS[verdict])
            return
        self._forget(stranger, close=False)
        channel = Channel(stranger.connection)
        self._shown[channel] = stranger.shown, stranger.address
        self._admit(channel, stranger.address)

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._forget(stranger)
        self._complaints.note(stranger.address, why)

    def _forget(self, stranger: _Stranger, close: bool = True) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)
        if close:
            with contextlib.suppress(OSError):
                # Unread bytes would make the system reset the connection, and drop the verdict.
                socket.socket.recv(stranger.connection, 1 << 16)
            stranger.connection.close()


def _listening_socket(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} is none: write one from 1 to 65535, such as 29600")
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} is no address: write one of this machine, such as 10.0.0.5 ({error})"
        ) from error
    try:
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--host {host} is no address of this machine: write one that it has, such as 127.0.0.1, or "
                "0.0.0.0 for all of them"
            ) from error
        raise ConfigError(
            f"port {port} of {host} cannot be opened, perhaps another server has it: give another --port "
            f"({error.strerror or error})"
        ) from error
