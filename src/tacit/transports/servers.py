"""The parameter servers, as a worker sees them: what it asks, and a transport that asks them."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tacit.contracts import SERVER, WORLD, Ask, Collective, Piece, Place, Posted
from tacit.errors import AttachError, ConfigError, PayloadError, PeerLost, ServerLost
from tacit.transports import stretches
from tacit.transports.meter import like
from tacit.transports.pairs import Header, Kind, Pair, Parcel, as_body, dumps, loads
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
_FRAMES = {"push": Kind.PUSH, "pull": Kind.PULL, "meet": Kind.MEET}


def addresses(text: str) -> list[tuple[str, int]]:
    """`"host:port,host:port"` as pairs.

    Raises:
        ConfigError: it is not of that form.
    """
    found = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = each.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 1 << 16):
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
    """One server. Questions leave from any thread; a thread waits for the answers, while there are any.

    Args:
        number: which of the servers it is.
        address: host and port of its store.
        me: which worker this is, and of how many.
        timeout: after which a server that says nothing is lost.
        about: what the server is told, and may refuse.

    Raises:
        ServerLost: it cannot be reached.
        AttachError: it serves another model, strategy, or number of workers.
    """

    def __init__(
        self, number: int, address: tuple[str, int], me: Place, timeout: timedelta, about: Mapping[str, Any]
    ) -> None:
        self.name = f"server {number} ({address[0]}:{address[1]})"
        self.counts = Counts()
        self._timeout = timeout
        self._failure: BaseException | None = None
        self._specs: dict[tuple[Any, ...], tuple[int, Parcel, Parcel]] = {}
        self._clocks: dict[str, int] = {}
        self._wholes: dict[str, Tensor] = {}
        self._open: dict[int, Asked] = {}
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._pair = self._connect(address, me, about)
        self._thread = threading.Thread(target=self._listen, name="tacit-pull", daemon=True)
        self._thread.start()
        hello = {"process": f"{_PROCESS}/{os.getpid()}", **about, "worker": me.rank, "workers": me.peers}
        told = loads(self.call(Kind.HELLO, dumps(hello)))
        self._clocks |= told["clocks"]

    def _connect(self, address: tuple[str, int], me: Place, about: Mapping[str, Any]) -> Pair:
        try:
            store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=self._timeout)
            incarnation = store.add(f"incarnation/{me.rank}", 1)
            name = f"pair/{me.rank}/{incarnation}"
            store.set(f"knock/{store.add('knocks', 1)}", f"{me.rank} {incarnation}")
            return Pair(store, name, 1, self._timeout)
        except (dist.DistError, RuntimeError) as error:
            raise ServerLost(f"{self.name} cannot be reached: {_first_line(error)}") from error

    # ---- asking ---------------------------------------------------------------------------------------

    def post_long(self, ask: Ask, key: str) -> Posted:
        """Ask of the lot that `key` names, of a service that averages; a long push in stretches."""
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

    def post(self, ask: Ask, key: str, into: Tensor | None = None) -> Asked:
        """Ask of the lot that `key` names; `into`: where the answer's bytes are to lie."""
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

    def enter(self, x: Tensor, key: str, back: Piece) -> Tensor:
        """Begin with a lot whose parameters are `x`; what the server has of it is returned."""
        whole = Piece(None, x.numel(), x.dtype)
        ask = Ask((), (), (whole,), do="meet")
        spec, _, arriving = self._spec(ask, key, {"back": back})
        for kind, body in ((Kind.ENTER, []), (Kind.OFFER, [x.view(torch.uint8)])):
            asked = self._wait(self._send(Header(kind, spec), body, Asked(arriving)))
            assert asked.header is not None
            if asked.header.nbytes:
                self._clocks[key] = asked.header.sequence
                found: Tensor = asked.found[0][0]
                return found.clone()
        raise AssertionError(f"{self.name} has not said what it has of {key}")

    def clock(self, key: str) -> int:
        """How many pushes of this lot the worker has made, over all of its lives."""
        return self._clocks.get(key, 0)

    def call(self, kind: Kind, text: bytes = b"") -> bytes:
        """Ask something that is not of a lot, and wait for the answer."""
        found: bytes = self._wait(self._send(Header(kind), as_body(text), Asked(None))).found
        return found

    def _wait(self, asked: Asked) -> Asked:
        asked.done.wait()
        asked.answer()
        return asked

    def _spec(self, ask: Ask, key: str, more: Mapping[str, Any] | None = None) -> tuple[int, Parcel, Parcel]:
        """The number under which the server knows how such a message is read; tells it, the first time."""
        known = (key, ask.do, ask.pieces, ask.pulls)
        if known not in self._specs:
            number = len(self._specs) + 1
            told = {"spec": number, "key": key, "pieces": list(ask.pieces), "pulls": list(ask.pulls)}
            self._frame(Header(Kind.DECLARE, -number), as_body(dumps(told | dict(more or {}))))
            self._specs[known] = (number, Parcel(ask.pieces), Parcel(ask.pulls))
        return self._specs[known]

    def _send(self, header: Header, body: Sequence[Tensor], asked: Asked) -> Asked:
        with self._changed:
            assert header.spec not in self._open, f"{self.name} was asked twice at once"
            self._open[header.spec] = asked
            self._changed.notify()
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
        """Until closed; only while something is asked, so that nothing hangs in Gloo as the process ends."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._closing)
                if not self._open:
                    return
            try:
                self._hear()
            except BaseException as error:
                self.abort(self._lost(error))
                return

    def _hear(self) -> None:
        header = self._pair.header(self._timeout)
        if header.kind == Kind.WAIT:
            return
        asked = self._open.get(header.spec)
        if header.kind != Kind.ANSWER or asked is None or asked.parcel is None or not header.nbytes:
            found: Any = self._pair.text(header, self._timeout)
            error = None
            if header.kind in _ERRORS:
                error = _ERRORS[Kind(header.kind)](found.decode())
        else:
            self._pair.body(asked.parcel.buffer, self._timeout)
            found, error = asked.parcel.unpack(), None
            self.counts.pulled += header.nbytes
            self.counts.stale += header.stale
            self.counts.queued += header.queued / 1e6
        with self._changed:
            self._open.pop(header.spec, None)
        if asked is not None:
            asked.end(found, header, error)

    def _lost(self, error: BaseException) -> BaseException:
        if self._failure is not None:
            return self._failure
        text = _first_line(error)
        if "imed out" in text:
            return ServerLost(
                f"{self.name} said nothing for {self._timeout.total_seconds():g} s: gone or frozen"
            )
        return ServerLost(f"{self.name} is gone: {text}")

    def abort(self, error: BaseException) -> None:
        """Answer all that is asked with this error, and whatever is asked from now on."""
        self._failure = self._failure or error
        with self._changed:
            asked, self._open, self._closing = [*self._open.values()], {}, True
            self._changed.notify()
        for each in asked:
            each.end(error=self._failure)

    def close(self) -> None:
        """Say goodbye, where there is somebody to hear it, and let go of the connection; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            asked = self._send(Header(Kind.LEAVE), (), Asked(None))
            asked.done.wait(LEAVE_SECONDS)
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._failure is None:
            self._thread.join(LEAVE_SECONDS)
        self._pair.drop()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---- the transport ------------------------------------------------------------------------------------


class Servers:
    """All servers: which of them has which lot.

    Args:
        where: their addresses.
        me: which worker this is, and of how many.
        homes: for each parameter, which server has it.
        about: what the servers are told; each is told of its own parameters as "model".
    """

    def __init__(
        self,
        where: Sequence[tuple[str, int]],
        me: Place,
        timeout: timedelta,
        homes: Mapping[str, int],
        about: Mapping[str, Any],
    ) -> None:
        self._homes = homes
        self.average = about["star"].averages
        self.each: list[Server] = []
        try:
            for number, address in enumerate(where):
                mine = [line for line in about["model"] if homes[line[0]] == number]
                told = {**about, "model": mine, "server": number, "servers": len(where)}
                self.each.append(Server(number, address, me, timeout, told))
        except BaseException as error:
            for server in self.each:
                server.abort(error)
            raise

    def of(self, slot: str) -> Server:
        """The one that has the lot whose first parameter is `slot`."""
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
        return [loads(server.call(Kind.STATS)) for server in self.each]


@dataclass(eq=False)
class StarTransport:
    """A transport that answers an `Ask` by the servers, and all else by `peers`."""

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

    def place(self, axis: str) -> Place:
        """See `contracts.Transport`."""
        return self.peers.place(WORLD if axis == SERVER else axis)

    def post(self, request: Collective, stage: int, slot: str) -> Posted:
        """Start it; see `contracts.Transport`."""
        if isinstance(request, Ask):
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
