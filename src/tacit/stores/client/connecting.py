"""How a worker connects to a parameter server, and each proves to the other that it knows the secret."""

from __future__ import annotations

import socket
import ssl
import time

from tacit.environment import TLS
from tacit.errors import AttachError, ServerLost
from tacit.stores import handshake
from tacit.stores.protocol import Channel
from tacit.stores.secret import Secret
from tacit.stores.tls import ALERT, TlsWorker

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


def open_channel(
    address: tuple[str, int], secret: Secret, seconds: float, server: str, tls: TlsWorker | None = None
) -> Channel:
    """Connect to a server, which may start later than its workers: try for so many seconds.

    Args:
        server: how errors name it.
        tls: which certificates are trusted; None: it speaks no TLS.

    Raises:
        ServerLost: there is none.
        AttachError: there is one that is not trusted, of another version, or with another secret.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return _try(address, secret, min(left, handshake.SECONDS), server, tls)
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise ServerLost(
                    f"{server} cannot be reached: {error.strerror or error}. Start it there, with a --host "
                    "and --port that this machine can reach"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _try(
    address: tuple[str, int], secret: Secret, seconds: float, server: str, tls: TlsWorker | None
) -> Channel:
    deadline = time.monotonic() + seconds
    connection = socket.create_connection(address, timeout=seconds)
    try:
        if tls is not None:
            connection = tls.begin(connection, address[0], server)
        greeting = _receive(connection, handshake.GREETING_BYTES, deadline, server)
        answer = handshake.reply(secret, greeting)
        try:
            handshake.check_greeting(greeting, server)
        except AttachError:
            connection.sendall(handshake.versions(answer))
            raise
        connection.sendall(answer)
        verdict = _receive(connection, handshake.VERDICT_BYTES, deadline, server)
        handshake.check_verdict(secret, greeting, answer, verdict, server)
    except ssl.SSLError as error:
        connection.close()
        assert tls is not None
        raise tls.refusal(error, server) from error
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


def _receive(connection: socket.socket, size: int, deadline: float, server: str) -> bytes:
    got = b""
    while len(got) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(got))
        if not part and got == ALERT:
            raise AttachError(f"{server} speaks TLS: set {TLS} to the fingerprint that it prints")
        if not part:
            raise ConnectionError("it closed the connection during the handshake")
        got += part
    return got
