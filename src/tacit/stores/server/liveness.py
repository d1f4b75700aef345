"""Finds lost workers: those on which others wait are asked, and given up when they are silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tacit.stores.server.connection import NOBODY, Connection
from tacit.stores.server.listener import RejectionLog
from tacit.stores.server.registration import Registry
from tacit.stores.server.services import BucketService, BucketServices
from tacit.stores.service import Sender

_HELLO_SECONDS = 10.0


class Liveness:
    """Finds the workers that have been silent for too long.

    Args:
        registry: its workers.
        services: its buckets.
        lose: gives a worker up, with a reason.
        rejections: logs closed connections.
    """

    def __init__(
        self,
        registry: Registry,
        services: BucketServices,
        lose: Callable[[Connection, str], None],
        rejections: RejectionLog,
    ) -> None:
        self._registry, self._services = registry, services
        self._lose, self._rejections = lose, rejections

    def check(self, connected: Iterable[Connection]) -> None:
        """Remind those that wait, ask those on which they wait, and give up those that are silent."""
        now = time.monotonic()
        for connection in connected:
            if connection.sender == NOBODY:
                self._check_hello(connection, now)
        for bucket in self._services:
            late = False
            for (sender, _), waiting in [*bucket.waiting.items()]:
                connection = self._registry.connections[sender]
                late |= now - waiting.since > self._registry.timeout
                if now - waiting.reminded > min(self._registry.timeout, connection.timeout) / 4:
                    connection.send(waiting.remind(now))
                    self._ask_missing(bucket, now)
            if late:
                self._give_up_silent(bucket, now)

    def _check_hello(self, connection: Connection, now: float) -> None:
        """Close a connection that sends no HELLO in time."""
        claims = any(claim.connection is connection for claim in self._registry.claims)
        if not (claims or connection.introduced) and now - connection.since > _HELLO_SECONDS:
            self._rejections.note(connection.address, f"it said no HELLO within {_HELLO_SECONDS:g} s")
            connection.channel.drop()

    def _ask_missing(self, bucket: BucketService, now: float) -> None:
        """Ask those for whom others wait whether they are there: they may wait for one that froze."""
        for worker in bucket.missing():
            for connection in self._registry.connections_of(worker):
                if connection.here and connection.alive >= connection.asked:
                    connection.ask_alive(now)

    def _give_up_silent(self, bucket: BucketService, now: float) -> None:
        timeout = self._registry.timeout
        said = f"was silent for {timeout:g} s while others waited for it"
        silent: list[Connection] = []
        for worker in bucket.missing():
            connections = [each for each in self._registry.connections_of(worker) if each.here]
            if not connections:  # it never came, or is gone from here already
                sender = Sender(worker, bucket.incarnation(worker))
                self._services.leave(sender, f"rank {worker} {said}: gone or frozen")
            silent += [each for each in connections if now - each.channel.received_at > timeout]
        frozen = [each for each in silent if each.unanswered(now) > timeout / 8]
        for connection in frozen or silent:
            how = ": gone or frozen" if frozen else ", though it is there"
            self._lose(connection, f"{connection.name} {said}{how}")
