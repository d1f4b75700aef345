"""Receives from one connection of a server: each frame is checked before any of it is stored.

Each connection has a separate thread, which runs `receive`. A malformed frame ends that connection alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import torch

from tacit.environment import HUB
from tacit.errors import PayloadError, TacitError
from tacit.stores import encoding
from tacit.stores.messages import Hello, MessageSpec
from tacit.stores.protocol import ALL, FrameKind, Header, as_body
from tacit.stores.server.allowed_types import AllowedTypes
from tacit.stores.server.connection import Arrival, Connection, Disconnection
from tacit.stores.server.listener import RejectionLog

_BARE = (FrameKind.ENTER, FrameKind.PULL, FrameKind.MEET, FrameKind.STATS, FrameKind.LEAVE, FrameKind.HERE)
"""Frames with no body."""
_OF_A_BUCKET = (
    *(FrameKind.ENTER, FrameKind.OFFER, FrameKind.PART, FrameKind.PUSH, FrameKind.PULL, FrameKind.MEET),
)
_MOST_CLOCK = 1 << 62
_ERROR_SECONDS = 1.0


def receive(
    connection: Connection,
    put: Callable[[Arrival | Disconnection], None],
    rejections: RejectionLog,
    allowed: AllowedTypes,
) -> None:
    """Receive frames until the connection ends, and hand them on.

    Args:
        put: gets each frame that the main thread is to see, and last that the connection has ended.
        rejections: where to log an invalid frame.
        allowed: the classes that it may name.
    """
    try:
        while True:
            frame = _frame(connection, allowed)
            if frame is not None:
                put(frame)
    except OSError as error:
        put(Disconnection(connection, str(error.strerror or error)))
    except Exception as error:
        why = f"{type(error).__name__}: {error}" if not isinstance(error, TacitError) else str(error)
        text = f"{_who(connection)} sent an invalid frame: {why:.300}"
        rejections.note(connection.address, text)
        with contextlib.suppress(OSError):
            connection.channel.send(Header(FrameKind.DROPPED, ALL), as_body(text.encode(errors="replace")))
            connection.channel.drain(_ERROR_SECONDS)
        put(Disconnection(connection, "it sent an invalid frame"))
    finally:
        connection.channel.close()


def _who(connection: Connection) -> str:
    return "somebody who knows the secret" if connection.limits is None else connection.name


def _frame(connection: Connection, allowed: AllowedTypes) -> Arrival | None:
    """The next frame; None: the main thread need not handle it."""
    received_at = connection.channel.received_at
    header = connection.channel.header()
    kind = _checked(connection, header)
    if kind == FrameKind.HERE:
        connection.note_alive(received_at)
        return None
    if kind == FrameKind.DECLARE:
        return (
            Arrival(connection, header, None, time.monotonic())
            if _declare(connection, header, allowed)
            else None
        )
    if kind == FrameKind.PART:
        part = torch.empty(header.nbytes, dtype=torch.uint8)
        connection.channel.body(part)
        if header.spec in connection.declared:
            connection.parts.setdefault(header.spec, {}).setdefault(header.sequence, []).append(part)
        return None
    connection.open.add(header.spec)
    body: object = None
    if kind == FrameKind.PUSH and header.spec in connection.declared:
        pushed = connection.declared[header.spec].pushed
        connection.channel.body(pushed.room(header.nbytes))
        pushed.arrived(connection.parts.pop(header.spec, {}))
    elif kind == FrameKind.HELLO:
        body = encoding.read(connection.channel.text(header, encoding.MOST_BYTES), Hello, allowed)
        connection.note_hello()
    elif header.spec in connection.refused:
        connection.channel.skip(header.nbytes)
    elif header.nbytes:
        body = torch.empty(header.nbytes, dtype=torch.uint8)
        connection.channel.body(body)
    elif kind == FrameKind.LEAVE:
        connection.note_leave()
    return Arrival(connection, header, body, time.monotonic())


def _checked(connection: Connection, header: Header) -> FrameKind:
    """Refuse a header that no worker would send now.

    Raises:
        PayloadError: the message says why.
    """
    if header.kind not in _FROM_WORKERS:
        raise PayloadError(f"a frame of kind {header.kind}, which workers have not")
    kind = FrameKind(header.kind)
    if connection.limits is None and kind in (FrameKind.ASK, FrameKind.SHARE):
        raise PayloadError(
            f"a member, where this is a parameter server of workers: let {HUB} name a hub, which is started "
            "with --min in place of --workers"
        )
    if connection.left or (connection.limits is None) != (kind == FrameKind.HELLO):
        when = (
            "after it had left"
            if connection.left
            else f"{'before' if connection.limits is None else 'after'} its HELLO"
        )
        raise PayloadError(f"a {kind.name} {when}")
    if header.spec in connection.open:
        raise PayloadError(f"a {kind.name} before the one before it was answered")
    if header.spec and kind not in (*_OF_A_BUCKET, FrameKind.DECLARE):
        raise PayloadError(f"a {kind.name} of message {header.spec}")
    least, most = _sizes(connection, kind, header)
    if not least <= header.nbytes <= most:
        wanted = f"{least}" if least == most else f"at most {most}"
        raise PayloadError(f"a {kind.name} of {header.nbytes} bytes, where {wanted} belong")
    if not (0 <= header.sequence < _MOST_CLOCK and math.isfinite(header.lr)):
        raise PayloadError(f"a {kind.name} of step {header.sequence} and learning rate {header.lr}")
    return kind


_FROM_WORKERS = frozenset(kind for kind in FrameKind if kind < FrameKind.ANSWER)


def _sizes(connection: Connection, kind: FrameKind, header: Header) -> tuple[int, int]:
    """How short and how long the body may be."""
    if kind in _BARE:
        size = 0
    elif kind not in _OF_A_BUCKET:
        return 0, encoding.MOST_BYTES
    elif header.spec in connection.refused:
        assert connection.limits is not None
        return 0, connection.limits.longest  # it gets the reason, whatever it sends
    elif header.spec not in connection.declared:
        raise PayloadError(f"a {kind.name} of message {header.spec}, which it has not declared")
    elif kind in (FrameKind.PART, FrameKind.PUSH):
        pushed, before = connection.declared[header.spec].pushed, connection.parts.get(header.spec, {})
        there = sum(len(part) for parts in before.values() for part in parts)
        return pushed.least if kind == FrameKind.PUSH else 1, pushed.most - there
    else:
        back = connection.declared[header.spec].spec.back
        size = 0 if back is None else back.numel * back.dtype.itemsize
    return size, size


def _declare(connection: Connection, header: Header, allowed: AllowedTypes) -> bool:
    """Note how messages of a number are read; False where they cannot be."""
    number = -header.spec
    if number <= 0 or number in connection.declared or number in connection.refused:
        raise PayloadError(f"a DECLARE of message {number}")
    text = connection.channel.text(header, encoding.MOST_BYTES)
    try:
        connection.declare(number, encoding.read(text, MessageSpec, allowed))
    except PayloadError:
        raise
    except TacitError as error:
        connection.reject(number, error)  # the worker gets the error when it pushes in this format
        return False
    return True
