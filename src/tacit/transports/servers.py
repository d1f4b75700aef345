"""The parameter servers, as a worker sees them: what it asks, and a transport that asks them."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import SERVER, WORLD, AxisRank, Collective, PayloadSpec, Posted, PushPull
from tacit.errors import AttachError, ConfigError, PayloadError, PeerLost, ServerLost
from tacit.transports import stretches, told
from tacit.transports.joining import joined
from tacit.transports.messages import About, Declared, Hello, Observations, Welcome
from tacit.transports.meter import like
from tacit.transports.pairs import ALL, Header, Kind, Pair, Parcel, as_body
from tacit.transports.secret import Secret
from tacit.transports.torch import TorchTransport

VARIABLE = "TACIT_SERVERS"
"""Where the launcher says which servers there are: host:port of each, with commas between."""
WORKER, WORKERS = "TACIT_WORKER", "TACIT_WORKERS"
"""Which worker a process is, and of how many, where it is started alone and has no world to tell it."""
LEAVE_SECONDS = 10.0
_PROCESS = uuid.uuid4().hex
"""With the process's number: a number alone may come back in a container that is started again."""

_ERRORS = {
    Kind.PEER_LOST: PeerLost,
    Kind.REFUSED: PayloadError,
    Kind.MISFIT: AttachError,
    Kind.DROPPED: ServerLost,
}
_KINDS = frozenset(Kind)
_FROM_SERVERS = {told.name_of(Welcome): Welcome}
_LOOK_SECONDS = 1.0
_FRAMES = {"push": Kind.PUSH, "pull": Kind.PULL, "meet": Kind.MEET}


def addresses(text: str) -> list[tuple[str, int]]:
    """`"host:port,host:port"` as pairs.

    Raises:
        ConfigError: it is not of that form.
    """
    found = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = each.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
            raise ConfigError(f"{each!r} is no address of a server: write host:port, such as 10.0.0.5:29600")
        found.append((host, int(port)))
    return found


@dataclass(eq=False)
class Asked:
    """A question on its way; `contracts.Posted`.

    Attributes:
        parcel: what the answer is read by; None: its body is text.
    """

    parcel: Parcel | None
    call: Callable[[], None] | None = None
    header: Header | None = None
    found: Any = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_done(self, call: Callable[[], None]) -> None:
        """See `contracts.Posted`."""
        with self._lock:
            self.call = call
            now = self.done.is_set()
        if now:
            call()

    def end(
        self, found: Any = None, header: Header | None = None, error: BaseException | None = None
    ) -> None:
        """Here is the answer, or what went wrong; the first one counts."""
        with self._lock:
            if self.done.is_set():
                return
            self.found, self.header, self.error = found, header, error
            self.done.set()
            call = self.call
        if call is not None:
            call()

    def answer(self) -> Any:
        """See `contracts.Posted`."""
        if self.error is not None:
            raise self.error
        return self.found


@dataclass
class Counts:
    """What a worker has sent and got, and how stale its pushes were."""

    pushed: int = 0
    pulled: int = 0
    pushes: int = 0
    stale: int = 0
    queued: float = 0.0


class Server:
    """One server. Questions leave from any thread; a thread of its own hears the answers.

    Args:
        number: which of the servers it is.
        address: its host and port.
        me: which worker this is, and of how many.
        timeout: after which a peer that does not answer is lost. Whoever waits for a server waits longer, as
            it waits for other workers, and says who is missing.
        about: what the server is told, and may refuse.
        secret: that server and workers share.

    Raises:
        ServerLost: it cannot be reached.
        AttachError: it has another secret or version, or serves another model, strategy or number of workers.
    """

    def __init__(
        self,
        number: int,
        address: tuple[str, int],
        me: AxisRank,
        timeout: timedelta,
        about: About,
        secret: Secret,
    ) -> None:
        self.name = f"server {number} ({address[0]}:{address[1]})"
        self.counts = Counts()
        self._patience = 1.5 * timeout.total_seconds() + 5
        self._failure: BaseException | None = None
        self._specs: dict[tuple[Any, ...], tuple[int, Parcel, Parcel]] = {}
        self._clocks: dict[str, int] = {}
        self._wholes: dict[str, Tensor] = {}
        self._open: dict[int, Asked] = {}
        self._opened = 0.0
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._pair: Pair = joined(address, secret, self._patience, self.name)
        self._pair.be_patient(self._patience)
        self._thread = threading.Thread(target=self._listen, name="tacit-pull", daemon=True)
        self._thread.start()
        process = f"{_PROCESS}/{os.getpid()}"
        hello = Hello(me.rank, me.peers, number, process, timeout.total_seconds(), about)
        try:
            welcome = told.read(self.call(Kind.HELLO, told.write(hello)), Welcome, _FROM_SERVERS)
        except BaseException as error:
            self.abort(error)
            raise
        self._clocks |= welcome.clocks

    # ---- asking ---------------------------------------------------------------------------------------

    def post_long(self, ask: PushPull, key: str) -> Posted:
        """Ask of the bucket that `key` names, of a service that averages; a long push in stretches."""
        i = stretches.long_piece(ask)
        if i is None:
            return self.post(ask, key)
        if key not in self._wholes:
            self._wholes[key] = torch.empty_like(like(ask.pulls[i])[0], device="cpu")
        whole = self._wholes[key]
        parts = [
            self.post(stretches.stretch(ask, i, a, b), f"{key}/{a}", whole[a:b])
            for a, b in stretches.spans(ask.pieces[i])
        ]
        others = len(ask.pieces) > 1
        if others:
            parts.append(self.post(stretches.rest(ask, i), f"{key}/rest"))
        return stretches.Joined(parts, i, whole, others)

    def post(self, ask: PushPull, key: str, into: Tensor | None = None) -> Asked:
        """Ask of the bucket that `key` names; `into`: where the answer's bytes are to lie."""
        spec, leaving, arriving = self._spec(ask, key)
        if into is not None:
            arriving.lie_in(into)
        sequence = 0
        if ask.do == "push":
            sequence = self._clocks[key] = self._clocks.get(key, 0) + 1
            self.counts.pushes += 1
        self.counts.pushed += leaving.nbytes
        header = Header(_FRAMES[ask.do], spec, sequence, lr=ask.lr)
        return self._send(header, leaving.pack(ask.payloads), Asked(arriving))

    def enter(self, x: Tensor, key: str, back: PayloadSpec) -> Tensor:
        """Begin with a bucket whose parameters are `x`; what the server has of it is returned."""
        whole = PayloadSpec(None, x.numel(), x.dtype)
        ask = PushPull((), (), (whole,), do="meet")
        spec, _, arriving = self._spec(ask, key, back)
        for kind, body in ((Kind.ENTER, []), (Kind.OFFER, [x.view(torch.uint8)])):
            asked = self._wait(self._send(Header(kind, spec), body, Asked(arriving)))
            assert asked.header is not None
            if asked.header.nbytes:
                self._clocks[key] = asked.header.sequence
                found: Tensor = asked.found[0][0]
                return found.clone()
        raise AssertionError(f"{self.name} has not said what it has of {key}")

    def clock(self, key: str) -> int:
        """How many pushes of this bucket the worker has made, over all of its lives."""
        return self._clocks.get(key, 0)

    def call(self, kind: Kind, text: bytes = b"") -> bytes:
        """Ask something that is not of a bucket, and wait for the answer."""
        found: bytes = self._wait(self._send(Header(kind), as_body(text), Asked(None))).found
        return found

    def _wait(self, asked: Asked) -> Asked:
        asked.done.wait()
        asked.answer()
        return asked

    def _spec(self, ask: PushPull, key: str, back: PayloadSpec | None = None) -> tuple[int, Parcel, Parcel]:
        """The number under which the server knows how such a message is read; tells it, the first time."""
        known = (key, ask.do, ask.pieces, ask.pulls)
        if known not in self._specs:
            number = len(self._specs) + 1
            declared = Declared(key, ask.pieces, ask.pulls, back)
            self._frame(Header(Kind.DECLARE, -number), as_body(told.write(declared)))
            self._specs[known] = (number, Parcel(ask.pieces), Parcel(ask.pulls))
        return self._specs[known]

    def _send(self, header: Header, body: Sequence[Tensor], asked: Asked) -> Asked:
        with self._changed:
            assert header.spec not in self._open, f"{self.name} was asked twice at once"
            self._opened = self._opened if self._open else time.monotonic()
            self._open[header.spec] = asked
        self._frame(header, body)
        return asked

    def _frame(self, header: Header, body: Sequence[Tensor]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._pair.send(header, body)
        except BaseException as error:
            self.abort(self._lost(error))

    # ---- answers --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until the connection ends, or says nothing for too long while something is asked."""
        try:
            while True:
                while not self._pair.ready(_LOOK_SECONDS):
                    heard = max(self._pair.heard, self._opened)
                    if self._open and time.monotonic() - heard > self._patience:
                        raise TimeoutError
                self._hear()
        except BaseException as error:
            if not self._closing:
                self.abort(self._lost(error))
        finally:
            self._pair.close()

    def _hear(self) -> None:
        header = self._pair.header(self._patience)
        if header.kind == Kind.WAIT:
            return
        if header.kind == Kind.STILL_HERE:
            self._pair.send(Header(Kind.HERE))
            return
        asked = self._open.get(header.spec)
        found: Any
        if header.kind == Kind.ANSWER and asked is not None and asked.parcel is not None and header.nbytes:
            if header.nbytes != asked.parcel.nbytes:
                raise PayloadError(
                    f"it answered {header.nbytes} bytes, where {asked.parcel.nbytes} were asked"
                )
            self._pair.body(asked.parcel.buffer, self._patience)
            found, error = asked.parcel.unpack(), None
            self.counts.pulled += header.nbytes
            self.counts.stale += header.stale
            self.counts.queued += header.queued / 1e6
        else:
            found = self._pair.text(header, told.MOST_BYTES, self._patience)
            kind = _ERRORS.get(Kind(header.kind)) if header.kind in _KINDS else None
            error = None if kind is None else kind(found.decode(errors="replace"))
            if error is not None and header.spec == ALL:
                raise error
        with self._changed:
            self._open.pop(header.spec, None)
        if asked is not None:
            asked.end(found, header, error)

    def _lost(self, error: BaseException) -> BaseException:
        if self._failure is not None:
            return self._failure
        if isinstance(error, ServerLost):
            return ServerLost(f"{self.name} has ended the connection: {error}")
        if isinstance(error, TimeoutError) and error.errno is None:
            return ServerLost(f"{self.name} said nothing for {self._patience:g} s: gone or frozen")
        return ServerLost(f"{self.name} is gone: {_first_line(error)}")

    def abort(self, error: BaseException) -> None:
        """Answer all that is asked with this error, and whatever is asked from now on."""
        self._failure = self._failure or error
        with self._changed:
            asked, self._open, self._closing = [*self._open.values()], {}, True
        for each in asked:
            each.end(error=self._failure)
        self._pair.drop()

    def close(self) -> None:
        """Say goodbye, where there is somebody to hear it, and let go of the connection; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            asked = self._send(Header(Kind.LEAVE), (), Asked(None))
            asked.done.wait(LEAVE_SECONDS)
        self._closing = True
        self._pair.drop()
        self._thread.join(LEAVE_SECONDS)


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---- the transport ------------------------------------------------------------------------------------


class Servers:
    """All servers: which of them has which bucket.

    Args:
        where: their addresses.
        me: which worker this is, and of how many.
        timeout: after which a peer that does not answer is lost.
        homes: for each parameter, which server has it.
        about: what the servers are told; each is told of its own parameters.
        secret: that they and the workers share.
        average: whether they only average; else they keep the parameters.
    """

    def __init__(
        self,
        where: Sequence[tuple[str, int]],
        me: AxisRank,
        timeout: timedelta,
        homes: Mapping[str, int],
        about: About,
        secret: Secret,
        average: bool,
    ) -> None:
        self._homes = homes
        self.average = average
        self.each: list[Server] = []
        try:
            for number, address in enumerate(where):
                mine = tuple(line for line in about.model if homes[line[0]] == number)
                self.each.append(Server(number, address, me, timeout, replace(about, model=mine), secret))
        except BaseException as error:
            for server in self.each:
                server.abort(error)
            raise

    def of(self, slot: str) -> Server:
        """The one that has the bucket whose first parameter is `slot`."""
        return self.each[self._homes[slot]]

    def abort(self, error: BaseException) -> None:
        """Answer all that is asked with this error."""
        for server in self.each:
            server.abort(error)

    def counts(self) -> dict[str, float]:
        """What this worker has pushed and pulled, summed over the servers; how stale its pushes were."""
        pushes = sum(server.counts.pushes for server in self.each)
        return {
            "push_bytes": sum(server.counts.pushed for server in self.each),
            "pull_bytes": sum(server.counts.pulled for server in self.each),
            "queue_seconds": sum(server.counts.queued for server in self.each),
            "staleness": sum(server.counts.stale for server in self.each) / max(1, pushes),
        }

    def facts(self) -> list[dict[str, Any]]:
        """What each server can tell of itself."""
        return [dict(told.read(server.call(Kind.STATS), Observations, {})) for server in self.each]


@dataclass(eq=False)
class StarTransport:
    """A transport that answers an `PushPull` by the servers, and all else by `peers`."""

    peers: TorchTransport
    servers: Servers

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """See `contracts.Transport`."""
        return self.peers.nodes

    def open(self, stages: Mapping[str, int]) -> None:
        """Groups of the workers, for what they ask each other. A collective call."""
        self.peers.open({axis: count for axis, count in stages.items() if axis != SERVER})

    def ranks(self, axis: str) -> Sequence[int]:
        """See `contracts.Transport`."""
        return self.peers.ranks(WORLD if axis == SERVER else axis)

    def place(self, axis: str) -> AxisRank:
        """See `contracts.Transport`."""
        return self.peers.place(WORLD if axis == SERVER else axis)

    def post(self, request: Collective, stage: int, slot: str) -> Posted:
        """Start it; see `contracts.Transport`."""
        if isinstance(request, PushPull):
            server, key = self.servers.of(slot), f"{slot}/{stage}"
            return server.post_long(request, key) if self.servers.average else server.post(request, key)
        return self.peers.post(request, stage, slot)

    def abort(self, error: BaseException | None = None) -> None:
        """End all that is under way with an error."""
        self.servers.abort(error or RuntimeError("the session has failed"))
        self.peers.abort(error)

    def close(self) -> None:
        """Leave the servers, and the groups to the next transport."""
        for server in self.servers.each:
            server.close()
        self.peers.close()
