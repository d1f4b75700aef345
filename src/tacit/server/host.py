"""The process around a server's services: workers come and go, messages arrive, replies leave.

One thread takes the messages, one after the other; so a service sees each as one event. Each worker has a
thread that receives (`receiving`), and one thread lets workers in (`transports.entrance`). Deadlines are kept
here: a worker on which others wait, and of which nothing was heard for the time-out, is gone, as is one whose
connection has closed. Whatever one connection does, the server goes on for the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tacit.contracts import Message, Reply, Sender
from tacit.errors import AttachError, PayloadError, PeerLost, ServerLost, TacitError
from tacit.server.averager import Averager
from tacit.server.checkpoint import Saved, StateSlice
from tacit.server.desks import Enter, Gone
from tacit.server.keeper import Keeper
from tacit.server.limits import Limits
from tacit.server.opening import check_place, content, differs, service_of
from tacit.server.receiving import receive
from tacit.server.seats import NOBODY, Arrived, Broken, Doubt, Seat, Shard, Waiting
from tacit.server.tally import Tally
from tacit.topologies.star import Star
from tacit.transports import told
from tacit.transports.entrance import Complaints, Entrance
from tacit.transports.messages import About, Hello, Welcome
from tacit.transports.pairs import Header, Kind, Pair, as_body
from tacit.transports.secret import Secret

_log = logging.getLogger("tacit")

_TICK_SECONDS = 0.2
_HELLO_SECONDS = 10.0
_ASK_SECONDS = 10.0
_DRAIN_SECONDS = 5.0
_KINDS = {PeerLost: Kind.PEER_LOST, AttachError: Kind.MISFIT, ServerLost: Kind.DROPPED}
_LONGEST_ERROR = 1 << 14


class Host:
    """One server, from its start until its workers have left.

    Args:
        workers: how many there are.
        port: where it listens; 0 for any that is free.
        number: which server it is, from 0.
        secret: what each worker must know.
        host: the address on which it listens.
        timeout: seconds after which a worker on which others wait is gone; None: as the workers say.
        kept: the file that its state is saved to and resumed from; None for none.
        every: seconds between two saves.

    Raises:
        ConfigError: there can be no listening, or the checkpoint cannot be read, or is of other workers.
    """

    def __init__(
        self,
        workers: int,
        port: int,
        number: int = 0,
        *,
        secret: Secret,
        host: str = "127.0.0.1",
        timeout: float | None = None,
        kept: Path | None = None,
        every: float = 30.0,
    ) -> None:
        self.workers, self.number = workers, number
        self._given, self._timeout = timeout, timeout or 60.0
        self._kept = StateSlice(kept, every, workers)
        self._saved = self._kept.load()
        self._inbox: SimpleQueue[Arrived | Broken] = SimpleQueue()
        self._connected: set[Seat] = set()
        self._seats: dict[Sender, Seat] = {}
        self._doubts: list[Doubt] = []
        self._lives: Counter[int] = Counter()
        self._shards: dict[str, Shard] = {}
        self._about: About | None = None if self._saved is None else self._saved.about
        self._left: set[int] = set()
        self._idle = time.monotonic()
        self._closing = threading.Event()
        self.tally = Tally()
        self._complaints = Complaints()
        self._entrance = Entrance(host, port, secret, self._admit, self._complaints)
        self.port = self._entrance.port

    @property
    def resumed(self) -> bool:
        """Whether it goes on from what was saved."""
        return self._saved is not None

    def _admit(self, pair: Pair, address: str) -> None:
        """Receive from somebody who knows the secret; called by the entrance."""
        seat = Seat(pair, address)
        if len(self._connected) >= 4 * self.workers + 16:
            self._complaints.of(address, f"{len(self._connected)} others are connected that know the secret")
            pair.close()
            return
        self._connected.add(seat)
        arguments = (seat, self._inbox.put, self._complaints)
        threading.Thread(target=receive, args=arguments, name="tacit-receive", daemon=True).start()

    # ---- the one that takes messages ------------------------------------------------------------------

    def run(self) -> None:
        """Serve until all workers have left, or those that came are gone and none comes back in time."""
        try:
            while not self._over():
                try:
                    self._turn()
                    self._kept.save(self._state)
                except Exception as error:  # a fault of ours, and no reason to leave the workers alone
                    self._complaints.of("this server:0", f"{type(error).__name__}: {error}")
            self._kept.save(self._state, last=True)
        finally:
            self._closing.set()
            self._entrance.close()
            deadline = time.monotonic() + _DRAIN_SECONDS
            for seat in tuple(self._connected):
                seat.pair.drain(max(0.0, deadline - time.monotonic()))
                seat.pair.drop()

    def stop(self) -> None:
        """End `run`, whoever is still there; from another thread."""
        self._closing.set()

    def _over(self) -> bool:
        if self._closing.is_set():
            return True
        if len(self._left) == self.workers:
            return True
        if not self._seats or self._doubts or any(seat.here for seat in self._seats.values()):
            self._idle = time.monotonic()
        return time.monotonic() - self._idle > self._timeout

    def _turn(self) -> None:
        try:
            event = self._inbox.get(timeout=_TICK_SECONDS)
        except Empty:
            event = None
        if isinstance(event, Arrived):
            self._guarded(event.seat, lambda: self._take(event))
        elif isinstance(event, Broken):
            event.seat.broken = True
            self._connected.discard(event.seat)
            self._lose(event.seat, f"{event.seat.name} is gone: {event.why}")
            event.seat.specs.clear()
        self._settle_doubts()
        self._look_at_clock()

    def _guarded(self, seat: Seat, call: Callable[[], None]) -> None:
        """Whatever goes wrong with what one worker has sent is an end for that one alone."""
        try:
            call()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._complaints.of(seat.address, f"{seat.name} sent what this server cannot take: {why:.300}")
            self._lose(seat, f"{seat.name} sent what this server cannot take")
            seat.pair.drop()

    def _take(self, event: Arrived) -> None:
        seat, header = event.seat, event.header
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
                seat.introduced, seat.since = False, time.monotonic()  # who is refused may not stay for ever
                self._hello(seat, header, event.body)
            case Kind.DECLARE:
                self._open_shard(seat, -header.spec)
            case Kind.STATS:
                self._send(seat, header, told.write(self.facts()))
            case Kind.LEAVE:
                self._left.add(seat.sender.worker)
                self._tell_gone(seat, f"{seat.name} has left")
                self._send(seat, header, b"")
            case _:
                self._to_shard(event)

    # ---- who comes ------------------------------------------------------------------------------------

    def _hello(self, seat: Seat, header: Header, hello: Hello) -> None:
        """Welcome a worker or refuse it; or ask the one that has its place whether it is still there."""
        check_place(hello, self.number, self.workers)
        others = tuple(other for other in self._seats_of(hello.worker) if other.here)
        if any(other.process == hello.process for other in others):
            raise AttachError(
                f"rank {hello.worker} has a session with these servers already, and they hold one model: "
                "close that session first, or give this one an algorithm without servers"
            )
        if self._about is not None and self._about != hello.about:
            raise AttachError(differs(hello, self._about))
        if not others:
            self._welcome(seat, header, hello)
            return
        now = time.monotonic()
        for other in others:
            self._frame(other, Header(Kind.STILL_HERE))
        until = now + min(_ASK_SECONDS, hello.timeout / 2)
        self._doubts.append(Doubt(seat, header, hello, others, now, until))

    def _settle_doubts(self) -> None:
        for doubt in [*self._doubts]:
            there = doubt.answer
            if not (doubt.seat.broken or there or doubt.over):
                continue
            self._doubts.remove(doubt)
            if doubt.seat.broken:
                continue
            if there is not None:
                error = AttachError(
                    f"rank {doubt.hello.worker} is at work already, from {there.address}: give each worker a "
                    "number of its own (TACIT_WORKER), and start one again only when it has ended"
                )
                self._refuse(doubt.seat, doubt.header, error)
                continue
            for other in doubt.others:
                self._lose(other, f"{other.name} has come back as another process")
                other.pair.drop()
            event = Arrived(doubt.seat, doubt.header, doubt.hello, time.monotonic())
            self._guarded(doubt.seat, lambda event=event: self._take(event))  # type: ignore[misc]

    def _welcome(self, seat: Seat, header: Header, hello: Hello) -> None:
        worker = hello.worker
        for gone in self._seats_of(worker):
            del self._seats[gone.sender]
        self._about = hello.about
        self._lives[worker] += 1
        seat.sender = Sender(worker, self._lives[worker])
        seat.process, seat.timeout = hello.process, hello.timeout
        seat.limits = Limits(hello.about.model)
        seat.pair.be_patient(1.5 * hello.timeout + 5)
        if self._given is None:
            self._timeout = max(each.timeout for each in (*self._seats.values(), seat) if each.here)
        self._seats[seat.sender] = seat
        self._left.discard(worker)
        for shard in self._shards.values():
            if isinstance(shard.service, Averager):
                self._give(shard, seat.sender, Message(0, Enter()))
        saved = self._saved.shards if self._saved else {}
        clocks = {key: each["number"] for key, each in saved.items() if "number" in each}
        clocks |= {key: shard.state.desks[worker].clock for key, shard in self._shards.items()}
        self._send(seat, header, told.write(Welcome(clocks)))

    def _seats_of(self, worker: int) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.sender.worker == worker]

    # ---- buckets -----------------------------------------------------------------------------------------

    def _open_shard(self, seat: Seat, number: int) -> None:
        assert self._about is not None
        star = self._about.star
        assert isinstance(star, Star)
        spec = seat.specs[number]
        ours = self._entries(spec.key)
        if spec.back is not None and ours not in (None, spec.back.numel):
            seat.refused[number] = AttachError(
                f"{seat.name} has {spec.back.numel} entries in the bucket of {spec.key}, and the server "
                f"{ours}: give all workers the same bucket_cap_mb, also where the server has a --checkpoint"
            )
            return
        if spec.key in self._shards or not (star.averages or spec.back):
            return
        saved = self._saved.shards.get(spec.key) if self._saved else None
        shard = self._shards[spec.key] = Shard(service_of(self._about, self.workers, spec), saved)
        for other in self._seats.values() if star.averages else ():
            if other.here:
                self._give(shard, other.sender, Message(0, Enter()))

    def _entries(self, key: str) -> int | None:
        """How many parameters a bucket has; None where none are known."""
        shard, saved = self._shards.get(key), self._saved.shards.get(key, {}) if self._saved else {}
        if shard is not None:
            return shard.service.back.numel if isinstance(shard.service, Keeper) else None
        return saved["x"].numel() if "x" in saved else None

    def _to_shard(self, event: Arrived) -> None:
        seat, header = event.seat, event.header
        if header.spec in seat.refused:
            raise seat.refused[header.spec]
        spec = seat.specs[header.spec]
        if spec.key not in self._shards:
            raise PayloadError(f"{seat.name} sent a message about {spec.key}, with which it has not begun")
        shard = self._shards[spec.key]
        now, sequence = time.monotonic(), header.sequence or -header.spec
        shard.waiting[seat.sender, sequence] = Waiting(header, now, now, now - event.at)
        self._give(shard, seat.sender, Message(sequence, content(header, spec, event.body, shard)))

    def _give(self, shard: Shard, sender: Sender, message: Message) -> None:
        began = time.monotonic()
        replies, shard.state = shard.service.on(sender, message, shard.state)
        for reply in replies:
            seat = self._seats.get(reply.to)
            if seat is not None:
                self._guarded(seat, lambda seat=seat, reply=reply: self._reply(shard, seat, reply))  # type: ignore[misc]
        self.tally.busy += time.monotonic() - began

    # ---- replies --------------------------------------------------------------------------------------

    def _reply(self, shard: Shard, seat: Seat, reply: Reply) -> None:
        waiting = shard.waiting.pop((reply.to, reply.sequence), None)
        if waiting is None:
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
        self._send(seat, header, str(error).encode(errors="replace")[:_LONGEST_ERROR], kind)

    def _send(self, seat: Seat, header: Header, text: bytes, kind: Kind = Kind.ANSWER) -> None:
        self._frame(seat, header._replace(kind=kind), as_body(text))

    def _frame(self, seat: Seat, header: Header, body: Any = ()) -> None:
        if seat.broken:
            return
        if header.kind not in (Kind.WAIT, Kind.STILL_HERE):
            seat.open.discard(header.spec)
        try:
            seat.pair.send(header, body)
        except OSError as error:
            _log.debug("%s: %s", seat.name, error)
            seat.pair.drop()  # whoever receives from it says so

    # ---- who is gone ----------------------------------------------------------------------------------

    def _lose(self, seat: Seat, why: str) -> None:
        if not (seat.left or seat.why):
            seat.why = why
            self._tell_gone(seat, why)

    def _tell_gone(self, seat: Seat, why: str) -> None:
        if seat.sender == NOBODY:
            return
        for shard in self._shards.values():
            for key in [key for key in shard.waiting if key[0] == seat.sender]:
                self._refuse(seat, shard.waiting.pop(key).header, ServerLost(f"the server goes on: {why}"))
            self._give(shard, seat.sender, Message(0, Gone(why)))

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for seat in [each for each in tuple(self._connected) if each.sender == NOBODY]:
            doubted = any(doubt.seat is seat for doubt in self._doubts)
            if not (doubted or seat.introduced) and now - seat.since > _HELLO_SECONDS:
                self._complaints.of(seat.address, f"it said no HELLO within {_HELLO_SECONDS:g} s")
                seat.pair.drop()
        for shard in self._shards.values():
            late = False
            for (sender, _), waiting in [*shard.waiting.items()]:
                seat = self._seats[sender]
                late |= now - waiting.since > self._timeout
                if now - waiting.told > min(self._timeout, seat.timeout) / 4:
                    waiting.told = now
                    self._frame(seat, waiting.header._replace(kind=Kind.WAIT))
                    self._ask_missing(shard, now)
            if late:
                self._drop_silent(shard, now)

    def _ask_missing(self, shard: Shard, now: float) -> None:
        """Ask those for whom others wait whether they are there: they may wait for one that froze."""
        for worker in shard.service.missing(shard.state):
            for seat in self._seats_of(worker):
                if seat.here and seat.still_here >= seat.asked:
                    seat.asked = now
                    self._frame(seat, Header(Kind.STILL_HERE))

    def _drop_silent(self, shard: Shard, now: float) -> None:
        said = f"was silent for {self._timeout:g} s while others waited for it"
        silent: list[Seat] = []
        for worker in shard.service.missing(shard.state):
            seats = [seat for seat in self._seats_of(worker) if seat.here]
            if not seats:  # it never came, or is gone from here already
                sender = Sender(worker, shard.state.desks[worker].incarnation)
                self._give_all(sender, f"rank {worker} {said}: gone or frozen")
            silent += [seat for seat in seats if now - seat.pair.heard > self._timeout]
        frozen = [seat for seat in silent if seat.unanswered(now) > self._timeout / 8]
        for seat in frozen or silent:
            how = ": gone or frozen" if frozen else ", though it is there"
            self._lose(seat, f"{seat.name} {said}{how}")

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

    def _state(self) -> Saved | None:
        if self._about is None:
            return None
        shards = dict(self._saved.shards) if self._saved else {}  # of some no worker may have told yet
        shards |= {key: shard.service.save(shard.state) for key, shard in self._shards.items()}
        return Saved(self._about, shards)
