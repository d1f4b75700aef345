"""What a server takes in of one connection: frame by frame, and nothing that is not as it may be.

Each connection has a thread of its own here. What is malformed ends that connection and no more.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import torch

from tacit.errors import PayloadError, TacitError
from tacit.server.seats import Arrived, Broken, Seat, Spec
from tacit.server.words import KNOWN
from tacit.transports import told
from tacit.transports.entrance import Complaints
from tacit.transports.messages import Declared, Hello
from tacit.transports.pairs import ALL, Header, Kind, as_body

_BARE = (Kind.ENTER, Kind.PULL, Kind.MEET, Kind.STATS, Kind.LEAVE, Kind.HERE)
"""What has no body."""
_OF_A_LOT = (Kind.ENTER, Kind.OFFER, Kind.PUSH, Kind.PULL, Kind.MEET)
_MOST_CLOCK = 1 << 62
_LAST_WORD_SECONDS = 1.0


def receive(seat: Seat, put: Callable[[Arrived | Broken], None], complaints: Complaints) -> None:
    """Take in frames until the connection ends, and hand them on."""
    try:
        while True:
            frame = _frame(seat)
            if frame is not None:
                put(frame)
    except OSError as error:
        put(Broken(seat, str(error.strerror or error)))
    except Exception as error:
        why = f"{type(error).__name__}: {error}" if not isinstance(error, TacitError) else str(error)
        text = f"{_who(seat)} sent what cannot be: {why:.300}"
        complaints.of(seat.address, text)
        with contextlib.suppress(OSError):
            seat.pair.send(Header(Kind.DROPPED, ALL), as_body(text.encode(errors="replace")))
            seat.pair.drain(_LAST_WORD_SECONDS)
        put(Broken(seat, "it sent what cannot be"))
    finally:
        seat.pair.close()


def _who(seat: Seat) -> str:
    return "somebody who knows the secret" if seat.limits is None else seat.name


def _frame(seat: Seat) -> Arrived | None:
    """The next one; None where nobody else need know of it."""
    heard = seat.pair.heard
    header = seat.pair.header()
    kind = _checked(seat, header)
    if kind == Kind.HERE:
        seat.still_here = time.monotonic()
        seat.pair.heard = heard  # who only says that it is there is silent all the same
        return None
    if kind == Kind.DECLARE:
        return Arrived(seat, header, None, time.monotonic()) if _declare(seat, header) else None
    seat.open.add(header.spec)
    body: object = None
    if kind == Kind.PUSH and header.spec in seat.specs:
        seat.pair.body(seat.specs[header.spec].arriving.buffer)
    elif kind == Kind.HELLO:
        body = told.read(seat.pair.text(header, told.MOST_BYTES), Hello, KNOWN)
        seat.introduced = True
    elif header.spec in seat.refused:
        seat.pair.skip(header.nbytes)
    elif header.nbytes:
        body = torch.empty(header.nbytes, dtype=torch.uint8)
        seat.pair.body(body)
    seat.left = kind == Kind.LEAVE
    return Arrived(seat, header, body, time.monotonic())


def _checked(seat: Seat, header: Header) -> Kind:
    """Refuse a header that no worker would send now.

    Raises:
        PayloadError: says why.
    """
    if header.kind not in _FROM_WORKERS:
        raise PayloadError(f"a frame of kind {header.kind}, which workers have not")
    kind = Kind(header.kind)
    if seat.left or (seat.limits is None) != (kind == Kind.HELLO):
        when = (
            "after it had left" if seat.left else f"{'before' if seat.limits is None else 'after'} its HELLO"
        )
        raise PayloadError(f"a {kind.name} {when}")
    if header.spec in seat.open:
        raise PayloadError(f"a {kind.name} before the one before it was answered")
    if header.spec and kind not in (*_OF_A_LOT, Kind.DECLARE):
        raise PayloadError(f"a {kind.name} of message {header.spec}")
    least, most = _sizes(seat, kind, header)
    if not least <= header.nbytes <= most:
        wanted = f"{least}" if least == most else f"at most {most}"
        raise PayloadError(f"a {kind.name} of {header.nbytes} bytes, where {wanted} belong")
    if not (0 <= header.sequence < _MOST_CLOCK and math.isfinite(header.lr)):
        raise PayloadError(f"a {kind.name} of step {header.sequence} and learning rate {header.lr}")
    return kind


_FROM_WORKERS = frozenset(kind for kind in Kind if kind < Kind.ANSWER)


def _sizes(seat: Seat, kind: Kind, header: Header) -> tuple[int, int]:
    """How short and how long the body may be."""
    if kind in _BARE:
        size = 0
    elif kind not in _OF_A_LOT:
        return 0, told.MOST_BYTES
    elif header.spec in seat.refused:
        assert seat.limits is not None
        return 0, seat.limits.longest  # it is told why, whatever it sends
    elif header.spec not in seat.specs:
        raise PayloadError(f"a {kind.name} of message {header.spec}, which it has not declared")
    elif kind == Kind.PUSH:
        size = seat.specs[header.spec].arriving.nbytes
    else:
        back = seat.specs[header.spec].back
        size = 0 if back is None else back.numel * back.dtype.itemsize
    return size, size


def _declare(seat: Seat, header: Header) -> bool:
    """Note how a kind of message is read; whether it can be."""
    assert seat.limits is not None
    number = -header.spec
    if number <= 0 or number in seat.specs or number in seat.refused:
        raise PayloadError(f"a DECLARE of message {number}")
    text = seat.pair.text(header, told.MOST_BYTES)
    try:
        declared = told.read(text, Declared, KNOWN)
        seat.limits.check(declared)
        spec = Spec.told(declared)
        seat.limits.check_size(spec.arriving, spec.leaving)
    except PayloadError:
        raise
    except TacitError as error:
        seat.refused[number] = error  # told to who pushes so
        return False
    seat.specs[number] = spec
    return True
