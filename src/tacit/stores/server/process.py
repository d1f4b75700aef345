"""The process around a server's services: it admits workers, receives messages, and sends replies.

One thread takes the messages, one after the other, so a service sees each as one event. Each worker has a
thread that receives (`receiving`), and one thread lets workers in (`listener`). A worker is given up when its
connection has closed, or when others wait on it and it was silent for the time-out (`liveness`). If one
connection fails, the server goes on for the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tacit.environment import WORKER
from tacit.errors import AttachError, ServerLost, TacitError
from tacit.stores import encoding
from tacit.stores.messages import Hello, Welcome
from tacit.stores.protocol import Channel, FrameKind, Header
from tacit.stores.secret import Secret
from tacit.stores.server.allowed_types import ALLOWED_TYPES, AllowedTypes
from tacit.stores.server.checkpoint import CheckpointFile, ServerSnapshot
from tacit.stores.server.connection import NOBODY, Arrival, Connection, Disconnection
from tacit.stores.server.counters import ServerCounters
from tacit.stores.server.listener import Listener, RejectionLog
from tacit.stores.server.liveness import Liveness
from tacit.stores.server.receiving import receive
from tacit.stores.server.registration import PlaceClaim, Registry
from tacit.stores.server.services import BucketService, BucketServices
from tacit.stores.service import Reply
from tacit.stores.tls import TlsServer

_TICK_SECONDS = 0.2
_DRAIN_SECONDS = 5.0


class ServerProcess:
    """One server, from its start until its workers have left.

    Args:
        workers: how many there are.
        port: where it listens; 0 for any that is free.
        number: the number of the server, from 0.
        secret: shared with the workers.
        host: the address on which it listens.
        timeout: seconds after which a silent worker on which others wait is gone; None: the workers'
            time-out.
        checkpoint: the file that its state is saved to and resumed from, and the seconds between two saves;
            None for none.
        allowed: the classes that workers may name.
        tls: its certificate, and those that workers must show; None: plain text.

    Raises:
        ConfigError: it cannot listen, or the checkpoint cannot be read, or is of other workers.
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
        checkpoint: tuple[Path, float] | None = None,
        allowed: AllowedTypes = ALLOWED_TYPES,
        tls: TlsServer | None = None,
    ) -> None:
        self.workers, self.number = workers, number
        self._allowed = allowed
        self._checkpoint = CheckpointFile(checkpoint, workers, allowed)
        saved = self._checkpoint.load()
        self.resumed = saved is not None
        self.counters = ServerCounters()
        self._rejections = RejectionLog()
        self._registry = Registry(number, workers, timeout, None if saved is None else saved.run)
        self._services = BucketServices(
            workers, {} if saved is None else saved.buckets, self.counters, self._deliver
        )
        self._liveness = Liveness(self._registry, self._services, self._lose, self._rejections)
        self._inbox: SimpleQueue[Arrival | Disconnection] = SimpleQueue()
        self._connected: set[Connection] = set()
        self._idle = time.monotonic()
        self._closing = threading.Event()
        self._listener = Listener(host, port, secret, self._admit, self._rejections, tls)
        self.port = self._listener.port

    def _admit(self, channel: Channel, address: str) -> None:
        """Receive from somebody who knows the secret; called by the listener."""
        connection = Connection(channel, address)
        if len(self._connected) >= 4 * self.workers + 16:
            self._rejections.note(
                address, f"{len(self._connected)} others are connected that know the secret"
            )
            channel.close()
            return
        self._connected.add(connection)
        arguments = (connection, self._inbox.put, self._rejections, self._allowed)
        threading.Thread(target=receive, args=arguments, name="tacit-receive", daemon=True).start()

    # ---- the thread that takes messages ---------------------------------------------------------------

    def run(self) -> None:
        """Serve until all workers have left, or those that came are gone and none comes back in time."""
        try:
            while not self._over():
                try:
                    self._turn()
                    self._checkpoint.save(self._snapshot)
                except Exception as error:  # a fault of ours, and no reason to leave the workers alone
                    self._rejections.note("this server:0", f"{type(error).__name__}: {error}")
            self._checkpoint.save(self._snapshot, last=True)
        finally:
            self._closing.set()
            self._listener.close()
            deadline = time.monotonic() + _DRAIN_SECONDS
            for connection in tuple(self._connected):
                connection.channel.drain(max(0.0, deadline - time.monotonic()))
                connection.channel.drop()

    def stop(self) -> None:
        """End `run`, whoever is still there; from another thread."""
        self._closing.set()

    def _over(self) -> bool:
        if self._closing.is_set() or len(self._registry.left) == self.workers:
            return True
        if self._registry.anybody_here():
            self._idle = time.monotonic()
        return time.monotonic() - self._idle > self._registry.timeout

    def _turn(self) -> None:
        """Take one message, if there is one, and look at the clock."""
        try:
            event = self._inbox.get(timeout=_TICK_SECONDS)
        except Empty:
            event = None
        if isinstance(event, Arrival):
            self._guarded(event.connection, lambda: self._take(event))
        elif isinstance(event, Disconnection):
            event.connection.close()
            self._connected.discard(event.connection)
            self._lose(event.connection, f"{event.connection.name} is gone: {event.why}")
            event.connection.free()
        for claim in self._registry.settled():
            self._settle(claim)
        self._liveness.check(tuple(self._connected))

    def _guarded(self, connection: Connection, call: Callable[[], None]) -> None:
        """Call a function for a connection; an error ends only that connection."""
        try:
            call()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            name = connection.name
            self._rejections.note(connection.address, f"{name} sent what this server cannot take: {why:.300}")
            self._lose(connection, f"{name} sent what this server cannot take")
            connection.channel.drop()

    def _take(self, arrival: Arrival) -> None:
        connection, header = arrival.connection, arrival.header
        if connection.lost:
            error = ServerLost(f"the server goes on without this process: {connection.lost}")
            connection.refuse(header, error)
            return
        self.counters.arrived(header, time.monotonic() - arrival.at)
        try:
            self._handle(arrival)
        except TacitError as error:
            connection.refuse(header, error)

    def _handle(self, arrival: Arrival) -> None:
        connection, header = arrival.connection, arrival.header
        match header.kind:
            case FrameKind.HELLO:
                connection.begin_hello()
                self._join(connection, header, arrival.body)
            case FrameKind.DECLARE:
                assert self._registry.run is not None
                here = [each.sender for each in self._registry.connections.values() if each.here]
                self._services.open(connection, -header.spec, self._registry.run, here)
            case FrameKind.STATS:
                connection.answer(header, encoding.write(self.stats()))
            case FrameKind.LEAVE:
                self._registry.leave(connection.sender.worker)
                self._leave(connection, f"{connection.name} has left")
                connection.answer(header, b"")
            case _:
                self._services.take(arrival)

    # ---- who comes ------------------------------------------------------------------------------------

    def _join(self, connection: Connection, header: Header, hello: Hello) -> None:
        """Welcome a worker or refuse it; or ask the one that has its place whether it is still there."""
        others = self._registry.check(hello)
        if others:
            self._registry.claim(connection, header, hello, others)
            return
        self._registry.welcome(connection, hello)
        self._services.enter(connection.sender)
        connection.answer(header, encoding.write(Welcome(self._services.clocks(hello.worker))))

    def _settle(self, claim: PlaceClaim) -> None:
        """Refuse a worker whose place is taken, or let it begin if the place has become free."""
        connection, holder = claim.connection, claim.holder
        if connection.closed:
            return
        if holder is not None:
            error = AttachError(
                f"rank {claim.hello.worker} is at work already, from {holder.address}: give each worker "
                f"another number ({WORKER}), and start one again only when it has ended"
            )
            connection.refuse(claim.header, error)
            return
        for other in claim.others:
            self._lose(other, f"{other.name} has come back as another process")
            other.channel.drop()
        arrival = Arrival(connection, claim.header, claim.hello, time.monotonic())
        self._guarded(connection, lambda: self._take(arrival))

    # ---- who is gone ----------------------------------------------------------------------------------

    def _lose(self, connection: Connection, why: str) -> None:
        """Give a worker up."""
        if connection.lose(why):
            self._leave(connection, why)

    def _leave(self, connection: Connection, why: str) -> None:
        """Refuse a worker's open messages, and notify the services that it is gone."""
        if connection.sender == NOBODY:
            return
        for bucket in self._services:
            for key in [key for key in bucket.waiting if key[0] == connection.sender]:
                connection.refuse(bucket.waiting.pop(key).header, ServerLost(f"the server goes on: {why}"))
        self._services.leave(connection.sender, why)

    # ---- replies --------------------------------------------------------------------------------------

    def _deliver(self, bucket: BucketService, reply: Reply) -> None:
        connection = self._registry.connections.get(reply.to)
        if connection is not None:
            self._guarded(connection, lambda: self._send(bucket, connection, reply))

    def _send(self, bucket: BucketService, connection: Connection, reply: Reply) -> None:
        waiting = bucket.waiting.pop((reply.to, reply.sequence), None)
        if waiting is None:
            return
        header = waiting.header
        if reply.refused is not None:
            connection.refuse(header, reply.refused)
            return
        body = connection.declared[header.spec].pulled.pack(reply.payloads) if reply.payloads else []
        self.counters.answered(sum(part.numel() for part in body))
        header = header._replace(
            kind=FrameKind.ANSWER,
            sequence=header.sequence if reply.clock is None else reply.clock,
            stale=reply.stale or 0,
            queued=round(1e6 * waiting.queued),
        )
        connection.send(header, body)

    # ---- reports --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What it has counted; see `ServerCounters`, and `stale` and `late` of `Service.staleness`."""
        stale, late = self._services.staleness()
        return {"server": self.number, "stale": stale, "late": late, **self.counters.stats()}

    def _snapshot(self) -> ServerSnapshot | None:
        run = self._registry.run
        return None if run is None else ServerSnapshot(run, self._services.save())
