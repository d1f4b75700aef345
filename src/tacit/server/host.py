"""The process around a server's services: workers come and go, messages arrive, replies leave.

One thread takes the messages, one after the other; so a service sees each as one event. Each worker has a
thread that receives, and one thread lets workers in. Deadlines are kept here: a worker on which others wait,
and of which nothing was heard for the time-out, is gone, as is one whose connection has closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tacit.contracts import Message, Piece, Reply, Sender
from tacit.errors import AttachError, ConfigError, PayloadError, PeerLost, ServerLost, TacitError
from tacit.server.averager import Averager
from tacit.server.checkpoint import Kept
from tacit.server.desks import Enter, Gone, Meet, Push
from tacit.server.keeper import Keeper
from tacit.server.rules import rule_of
from tacit.server.seats import Arrived, Broken, Seat, Shard, Spec, Waiting
from tacit.server.tally import Tally
from tacit.topologies.star import Star
from tacit.transports.pairs import Header, Kind, Pair, as_body, dumps, loads

_log = logging.getLogger("tacit")

_EVER = timedelta(days=365)
_LOOK_SECONDS = 0.02
_TICK_SECONDS = 0.2
_KINDS = {PeerLost: Kind.PEER_LOST, AttachError: Kind.MISFIT, ServerLost: Kind.DROPPED}
_ABOUT = ("star", "rule", "model")


class Host:
    """One server, from its start until its workers have left.

    Args:
        workers: how many there are.
        port: where its store listens.
        number: which server it is, from 0.
        timeout: seconds after which a worker on which others wait is gone.
        kept: the file that its state is saved to and resumed from; None for none.
        every: seconds between two saves.

    Raises:
        ConfigError: the port is in use, or the checkpoint cannot be read, or is of other workers.
    """

    def __init__(
        self,
        workers: int,
        port: int,
        number: int = 0,
        timeout: float = 60.0,
        kept: Path | None = None,
        every: float = 30.0,
    ) -> None:
        self.workers, self.number, self._timeout = workers, number, timeout
        self._kept = Kept(kept, every, workers)
        self._saved = self._kept.load()
        self._store = _listen(port, timeout)
        self.port = self._store.port
        self._inbox: SimpleQueue[Arrived | Broken] = SimpleQueue()
        self._seats: dict[Sender, Seat] = {}
        self._shards: dict[str, Shard] = {}
        self._about: dict[str, Any] = {key: self._saved[key] for key in _ABOUT if self._saved}
        self._left: set[int] = set()
        self._idle = time.monotonic()
        self._closing = threading.Event()
        self.tally = Tally()
        threading.Thread(target=self._let_in, name="tacit-door", daemon=True).start()

    @property
    def resumed(self) -> bool:
        """Whether it goes on from what was saved."""
        return self._saved is not None

    # ---- threads --------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        turn = 1
        while not self._closing.wait(_LOOK_SECONDS):
            while self._store.check([f"knock/{turn}"]):
                sender = Sender(*map(int, self._store.get(f"knock/{turn}").split()))
                turn += 1
                threading.Thread(target=self._serve, args=(sender,), daemon=True).start()

    def _serve(self, sender: Sender) -> None:
        """Receive from one worker until it is gone."""
        try:
            name = f"pair/{sender.worker}/{sender.incarnation}"
            pair = Pair(self._store, name, 0, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            _log.warning("worker %d came and was gone: %s", sender.worker, _first_line(error))
            return
        seat = Seat(sender, pair)
        try:
            while not seat.left:
                self._receive(seat, pair.header(_EVER))
        except (RuntimeError, TacitError) as error:
            self._inbox.put(Broken(seat, _first_line(error)))

    def _receive(self, seat: Seat, header: Header) -> None:
        spec, body = seat.specs.get(header.spec), None
        if header.kind == Kind.PUSH and spec is not None and header.nbytes == spec.arriving.nbytes:
            seat.pair.body(spec.arriving.buffer, _EVER)
        else:
            body = seat.pair.text(header, _EVER)
        if header.kind == Kind.DECLARE:
            assert body is not None
            try:
                seat.specs[-header.spec] = Spec.told(loads(body))
            except TacitError as error:
                seat.refused[-header.spec] = error  # told to who pushes so
                return
        seat.left = header.kind == Kind.LEAVE
        self._inbox.put(Arrived(seat, header, body, time.monotonic()))

    # ---- the one that takes messages ------------------------------------------------------------------

    def run(self) -> None:
        """Serve until all workers have left, or those that came are gone and none comes back in time."""
        while not self._over():
            try:
                event = self._inbox.get(timeout=_TICK_SECONDS)
            except Empty:
                event = None
            if isinstance(event, Arrived):
                self._take(event)
            elif isinstance(event, Broken):
                event.seat.broken = True
                self._lose(event.seat, f"{event.seat.name} is gone: {event.why}")
            self._look_at_clock()
            self._kept.save(self._state)
        self._kept.save(self._state, last=True)
        self._closing.set()

    def stop(self) -> None:
        """End `run`, whoever is still there; from another thread."""
        self._closing.set()

    def _over(self) -> bool:
        if self._closing.is_set():
            return True
        if len(self._left) == self.workers:
            return True
        if not self._seats or any(seat.here for seat in self._seats.values()):
            self._idle = time.monotonic()
        return time.monotonic() - self._idle > self._timeout

    def _take(self, event: Arrived) -> None:
        seat, header = event.seat, event.header
        seat.heard = event.at
        if seat.why:
            self._refuse(seat, header, ServerLost(f"the server goes on without this process: {seat.why}"))
            return
        self.tally.arrived(header, time.monotonic() - event.at)
        try:
            self._handle(event)
        except TacitError as error:
            self._refuse(seat, header, error)

    def _handle(self, event: Arrived) -> None:
        seat, header = event.seat, event.header
        match header.kind:
            case Kind.HELLO:
                self._send(seat, header, dumps(self._hello(seat, loads(event.body))))
            case Kind.DECLARE:
                self._open_shard(seat, -header.spec)
            case Kind.STATS:
                self._send(seat, header, dumps(self.facts()))
            case Kind.LEAVE:
                self._left.add(seat.sender.worker)
                self._tell_gone(seat, f"{seat.name} has left")
                self._send(seat, header, b"")
            case _:
                self._to_shard(event)

    def _hello(self, seat: Seat, told: dict[str, Any]) -> dict[str, Any]:
        worker = seat.sender.worker
        _check_place(told, self.number, self.workers)
        if any(other.here and other.process == told["process"] for other in self._seats_of(worker)):
            raise AttachError(
                f"{seat.name} has a session with these servers already, and they hold one model: close that "
                "session first, or give this one an algorithm without servers"
            )
        for what in _ABOUT:
            ours = self._about.setdefault(what, told[what])
            if ours != told[what]:
                raise AttachError(_differs(what, worker, told[what], ours))
        for other in self._seats_of(worker):
            if other.here:
                self._lose(other, f"{other.name} has come back as another process")
        seat.process = told["process"]
        self._seats[seat.sender] = seat
        self._left.discard(worker)
        for shard in self._shards.values():
            if isinstance(shard.service, Averager):
                self._give(shard, seat.sender, Message(0, Enter()))
        saved = self._saved["shards"] if self._saved else {}
        clocks = {key: each["number"] for key, each in saved.items() if "number" in each}
        clocks |= {key: shard.state.desks[worker].clock for key, shard in self._shards.items()}
        return {"clocks": clocks}

    def _seats_of(self, worker: int) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.sender.worker == worker]

    def _open_shard(self, seat: Seat, number: int) -> None:
        star: Star = self._about["star"]
        spec = seat.specs[number]
        ours = self._entries(spec.key)
        if spec.back is not None and ours not in (None, spec.back.numel):
            seat.refused[number] = AttachError(
                f"{seat.name} has {spec.back.numel} entries in the lot of {spec.key}, and the server {ours}: "
                "give all workers the same bucket_cap_mb, also where the server has a --checkpoint"
            )
            return
        if spec.key in self._shards or not (star.averages or spec.back):
            return
        service: Averager | Keeper = Averager(self.workers, spec.key)
        if not star.averages:
            assert spec.back is not None
            rule = None if self._about["rule"] is None else rule_of(self._about["rule"])
            service = Keeper(self.workers, star, spec.back, rule, spec.key)
        saved = self._saved["shards"].get(spec.key) if self._saved else None
        shard = self._shards[spec.key] = Shard(service, saved)
        for seat in self._seats.values() if star.averages else ():
            if seat.here:
                self._give(shard, seat.sender, Message(0, Enter()))

    def _entries(self, key: str) -> int | None:
        """How many parameters a lot has; None where none are known."""
        shard, saved = self._shards.get(key), self._saved["shards"].get(key, {}) if self._saved else {}
        if shard is not None:
            return shard.service.back.numel if isinstance(shard.service, Keeper) else None
        return saved["x"].numel() if "x" in saved else None

    def _to_shard(self, event: Arrived) -> None:
        seat, header = event.seat, event.header
        spec = seat.specs.get(header.spec)
        if header.spec in seat.refused:
            raise seat.refused[header.spec]
        if spec is None or spec.key not in self._shards or seat.sender not in self._seats:
            raise PayloadError(f"{seat.name} sent message {header.spec}, and has not declared what that is")
        shard = self._shards[spec.key]
        if header.kind == Kind.PUSH and event.body is not None:
            raise PayloadError(
                f"{seat.name} pushed {header.nbytes} bytes of {spec.key}, of which {spec.arriving.nbytes} "
                "were declared"
            )
        now, sequence = time.monotonic(), header.sequence or -header.spec
        shard.waiting[seat.sender, sequence] = Waiting(header, now, now, now - event.at)
        self._give(shard, seat.sender, Message(sequence, _content(header, spec, event.body, shard)))

    def _give(self, shard: Shard, sender: Sender, message: Message) -> None:
        began = time.monotonic()
        replies, shard.state = shard.service.on(sender, message, shard.state)
        for reply in replies:
            self._reply(shard, reply)
        self.tally.busy += time.monotonic() - began

    # ---- replies --------------------------------------------------------------------------------------

    def _reply(self, shard: Shard, reply: Reply) -> None:
        seat = self._seats.get(reply.to)
        waiting = shard.waiting.pop((reply.to, reply.sequence), None)
        if seat is None or waiting is None:
            return
        if reply.refused is not None:
            self._refuse(seat, waiting.header, reply.refused)
            return
        header = waiting.header._replace(
            kind=Kind.ANSWER,
            sequence=reply.facts.get("clock", waiting.header.sequence),
            stale=reply.facts.get("stale", 0),
            queued=round(1e6 * waiting.queued),
        )
        body = seat.specs[header.spec].leaving.pack(reply.payloads) if reply.payloads else []
        self.tally.answered(sum(part.numel() for part in body))
        self._frame(seat, header, body)

    def _refuse(self, seat: Seat, header: Header, error: Exception) -> None:
        kind = next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), Kind.REFUSED)
        self._send(seat, header, str(error).encode(), kind)

    def _send(self, seat: Seat, header: Header, text: bytes, kind: Kind = Kind.ANSWER) -> None:
        self._frame(seat, header._replace(kind=kind), as_body(text))

    def _frame(self, seat: Seat, header: Header, body: Any = ()) -> None:
        if seat.broken:
            return
        try:
            seat.pair.send(header, body)
        except RuntimeError as error:
            self._inbox.put(Broken(seat, _first_line(error)))

    # ---- who is gone ----------------------------------------------------------------------------------

    def _lose(self, seat: Seat, why: str) -> None:
        if not (seat.left or seat.why):
            seat.why = why
            self._tell_gone(seat, why)

    def _tell_gone(self, seat: Seat, why: str) -> None:
        for shard in self._shards.values():
            for key in [key for key in shard.waiting if key[0] == seat.sender]:
                self._refuse(seat, shard.waiting.pop(key).header, ServerLost(f"the server goes on: {why}"))
            self._give(shard, seat.sender, Message(0, Gone(why)))

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for shard in self._shards.values():
            late = False
            for (sender, _), waiting in [*shard.waiting.items()]:
                late |= now - waiting.since > self._timeout
                if now - waiting.told > self._timeout / 4:
                    waiting.told = now
                    self._frame(self._seats[sender], waiting.header._replace(kind=Kind.WAIT))
            if late:
                self._drop_silent(shard, now)

    def _drop_silent(self, shard: Shard, now: float) -> None:
        for worker in shard.service.missing(shard.state):
            seats = [seat for seat in self._seats.values() if seat.sender.worker == worker and seat.here]
            why = (
                f"rank {worker} was silent for {self._timeout:g} s while others waited for it: gone or frozen"
            )
            if not seats:  # it never came, or is gone from here already
                self._give_all(Sender(worker, shard.state.desks[worker].incarnation), why)
            for seat in seats:
                if now - seat.heard > self._timeout:
                    self._lose(seat, why)

    def _give_all(self, sender: Sender, why: str) -> None:
        for shard in self._shards.values():
            self._give(shard, sender, Message(0, Gone(why)))

    # ---- what it tells --------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """The server in numbers; see `Tally`."""
        stale: dict[int, int] = {}
        late = 0
        for shard in self._shards.values():
            told = shard.service.facts(shard.state)
            late += told["late"]
            for age, count in told["stale"].items():
                stale[age] = stale.get(age, 0) + count
        return {"server": self.number, "stale": stale, "late": late, **self.tally.facts()}

    def _state(self) -> dict[str, Any] | None:
        if not self._about:
            return None
        shards = dict(self._saved["shards"]) if self._saved else {}  # of some no worker may have told yet
        shards |= {key: shard.service.save(shard.state) for key, shard in self._shards.items()}
        return {**self._about, "shards": shards}


def _content(header: Header, spec: Spec, body: Any, shard: Shard) -> object:
    match header.kind:
        case Kind.PUSH:
            return Push(spec.arriving.unpack(), spec.pieces, spec.pulls, header.lr)
        case Kind.OFFER:
            back: Piece = shard.service.back
            return Enter(torch.frombuffer(bytearray(body), dtype=back.dtype))
        case Kind.ENTER:
            return Enter()
        case _:
            return Meet()


def _listen(port: int, timeout: float) -> TCPStore:
    try:
        return TCPStore(
            "0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except (dist.DistError, RuntimeError) as error:
        raise ConfigError(
            f"port {port} cannot be opened, perhaps another server has it: give another --port "
            f"({_first_line(error)})"
        ) from error


def _check_place(told: Mapping[str, Any], number: int, workers: int) -> None:
    worker = told["worker"]
    if told["workers"] != workers or not 0 <= worker < workers:
        raise AttachError(
            f"worker {worker} is one of {told['workers']}, and server {number} waits for {workers}: start it "
            f"with --workers {told['workers']}"
        )
    if told["server"] != number:
        raise AttachError(
            f"worker {worker} takes server {number} for server {told['server']}: list the servers in the "
            "same order everywhere"
        )


def _differs(what: str, worker: int, theirs: Any, ours: Any) -> str:
    if what != "model":
        return f"worker {worker} attaches {theirs}, and the server keeps {ours}: give all the same strategy"
    pairs = zip([*theirs, None], [*ours, None], strict=False)
    one, other = next((a, b) for a, b in pairs if a != b)
    return (
        f"worker {worker} has another model: its {_words(one)} is the server's {_words(other)}. Give all "
        "workers the same model, and start a server with another model without the old --checkpoint"
    )


def _words(parameter: Any) -> str:
    if parameter is None:
        return "end of the parameters"
    name, shape, dtype = parameter
    return f"parameter {name} of shape {tuple(shape)} and {dtype}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
