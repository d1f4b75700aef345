"""How a worker joins a server: checks of its HELLO, and claims of a place that is taken."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tacit.errors import AttachError
from tacit.stores.messages import Hello, RunSpec
from tacit.stores.protocol import Header
from tacit.stores.server.connection import Connection
from tacit.stores.server.limits import check_model
from tacit.stores.server.optimizers import optimizer_from
from tacit.stores.service import Sender

_CLAIM_SECONDS = 10.0


@dataclass(frozen=True)
class PlaceClaim:
    """A worker that wants to join while another process, which was asked whether it is there, has its place.

    Attributes:
        connection: the worker's connection.
        header: the header of its `hello`.
        others: the connections that have the place.
        since: when these were asked.
        until: when they count as gone.
    """

    connection: Connection
    header: Header
    hello: Hello
    others: tuple[Connection, ...]
    since: float
    until: float

    @property
    def holder(self) -> Connection | None:
        """One of the others that is still there."""
        return next((each for each in self.others if each.here and each.alive >= self.since), None)

    @property
    def over(self) -> bool:
        """Whether none of the others is there any more, or none has answered in time."""
        return time.monotonic() > self.until or not any(each.here for each in self.others)


class Registry:
    """The workers of a server, and their connections.

    Args:
        number: the number of the server, from 0.
        workers: the number of workers.
        timeout: seconds after which a silent worker on which others wait is gone; None: the workers'
            time-out.
        run: the description of the run, if it is known from a checkpoint.

    Attributes:
        connections: those of each life of a worker, until another life of it is welcome.
        claims: workers that wait for a place which another process has.
        left: the workers that have sent LEAVE.
    """

    def __init__(self, number: int, workers: int, timeout: float | None, run: RunSpec | None) -> None:
        self.number, self.workers, self.run = number, workers, run
        self.connections: dict[Sender, Connection] = {}
        self.claims: list[PlaceClaim] = []
        self.left: set[int] = set()
        self._given, self.timeout = timeout, timeout or 60.0
        self._lives: Counter[int] = Counter()

    def connections_of(self, worker: int) -> list[Connection]:
        """The connections of a worker, which may be of several lives."""
        return [each for each in self.connections.values() if each.sender.worker == worker]

    def anybody_here(self) -> bool:
        """Whether a worker is there, or comes; True as long as none was."""
        return (
            not self.connections or bool(self.claims) or any(each.here for each in self.connections.values())
        )

    def check(self, hello: Hello) -> tuple[Connection, ...]:
        """Refuse a worker that does not belong here. Returns the connections that have its place.

        Raises:
            AttachError: the message says why.
        """
        _check_place(hello, self.number, self.workers)
        others = tuple(other for other in self.connections_of(hello.worker) if other.here)
        if any(other.process == hello.process for other in others):
            raise AttachError(
                f"rank {hello.worker} has a session with these servers already, and they hold one model: "
                "close that session first, or give this one an algorithm without servers"
            )
        if self.run is not None and self.run != hello.run:
            raise AttachError(_difference(hello, self.run))
        return others

    def claim(
        self, connection: Connection, header: Header, hello: Hello, others: tuple[Connection, ...]
    ) -> None:
        """Ask those that have the place of a worker whether they are there."""
        now = time.monotonic()
        for other in others:
            other.ask_alive()
        until = now + min(_CLAIM_SECONDS, hello.timeout / 2)
        self.claims.append(PlaceClaim(connection, header, hello, others, now, until))

    def settled(self) -> Iterator[PlaceClaim]:
        """The claims that are decided, or whose worker is gone; they are claims no more."""
        for claim in [*self.claims]:
            if claim.connection.closed or claim.holder or claim.over:
                self.claims.remove(claim)
                yield claim

    def leave(self, worker: int) -> None:
        """Note that a worker has sent LEAVE."""
        self.left.add(worker)

    def welcome(self, connection: Connection, hello: Hello) -> None:
        """Give a worker its place."""
        worker = hello.worker
        for gone in self.connections_of(worker):
            del self.connections[gone.sender]
        self.run = hello.run
        self._lives[worker] += 1
        connection.welcome(Sender(worker, self._lives[worker]), hello)
        if self._given is None:
            self.timeout = max(each.timeout for each in (*self.connections.values(), connection) if each.here)
        self.connections[connection.sender] = connection
        self.left.discard(worker)


def _check_place(hello: Hello, number: int, workers: int) -> None:
    """Refuse a worker of another server, or with impossible numbers.

    Raises:
        AttachError: the message says why.
    """
    worker = hello.worker
    if hello.workers != workers or not 0 <= worker < workers:
        raise AttachError(
            f"worker {worker} is one of {hello.workers}, and server {number} waits for {workers}: start it "
            f"with --workers {hello.workers}"
        )
    if hello.server != number:
        raise AttachError(
            f"worker {worker} takes server {number} for server {hello.server}: list the servers in the "
            "same order everywhere"
        )
    if not 0 < hello.timeout < 1e9:
        raise AttachError(f"worker {worker} has a time-out of {hello.timeout} s, which is none")
    check_model(hello.run.model, len(hello.run.optimizers))
    for spec in hello.run.optimizers:
        optimizer_from(spec)


def _difference(hello: Hello, ours: RunSpec) -> str:
    """What of a worker is not as it is with the others."""
    theirs, who = hello.run, f"worker {hello.worker}"
    if theirs.star != ours.star:
        return f"{who} attaches {theirs.star}, and the server keeps {ours.star}: give all the same strategy"
    if theirs.optimizers != ours.optimizers:
        optimizers = f"has the optimizer {theirs.optimizers}, and the server {ours.optimizers}"
        return f"{who} {optimizers}: give all the same one"
    pairs = zip([*theirs.model, None], [*ours.model, None], strict=False)
    one, other = next((a, b) for a, b in pairs if a != b)
    return (
        f"{who} has another model: its {_described(one)} is the server's {_described(other)}. Give all "
        "workers the same model, and start a server with another model without the old --checkpoint"
    )


def _described(parameter: Any) -> str:
    if parameter is None:
        return "end of the parameters"
    name, shape, dtype, *_ = parameter
    return f"parameter {name} of shape {shape} and {dtype}"
