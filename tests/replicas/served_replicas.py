"""Replicas in threads whose messages a parameter server without a network answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from replica_threads import Crew
from torch import Tensor

from tacit.contracts import (
    SERVER,
    WORLD,
    AxisRank,
    Collective,
    Payload,
    PayloadSpec,
    Posted,
    PushPull,
    ServerTopology,
)
from tacit.stores.client.server_connection import KINDS
from tacit.stores.messages import Message, MessageSpec, PayloadBuffer, RunSpec
from tacit.stores.protocol import FrameKind
from tacit.stores.server.services import service_for
from tacit.stores.service import Reply, Sender, Service
from tacit.transports.loopback import Answer, Loopback, LoopbackTransport
from tacit.transports.message_layout import nbytes


class Due(Answer):
    """A reply that is due: payloads, or an error."""

    def __init__(self, pulls: Sequence[PayloadSpec], sent: int = 0) -> None:
        super().__init__(sent)
        self.pulls, self.clock = tuple(pulls), 0

    def answer(self) -> Any:
        found = super().answer()
        if isinstance(found, Exception):
            raise found
        return found


def travelled(payloads: Sequence[Payload], pieces: Sequence[PayloadSpec]) -> tuple[Payload, ...]:
    """What is read at the other end."""
    body = torch.cat(PayloadBuffer(pieces).pack(payloads))
    there = PayloadBuffer(pieces)
    there.room(len(body)).copy_(body)
    there.arrived()
    return there.unpack()


class Served:
    """A server: a service for each bucket, begun with its first message.

    Attributes:
        lives: of each worker; a dead one has its last life's number until it comes back.
    """

    def __init__(self, workers: int, star: ServerTopology) -> None:
        self.workers, self.star = workers, star
        self.lives = [1] * workers
        self.services: dict[str, Service[Any]] = {}
        self.states: dict[str, Any] = {}
        self.bytes = 0
        self._due: dict[tuple[str, Sender, int], Due] = {}
        self._clocks: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._lock = threading.RLock()
        self._asked = 0

    def post(self, rank: int, request: PushPull, key: str) -> Due:
        with self._lock:
            self._open(key, None)
            kind = KINDS[request.do]
            sequence = self._next(key, rank) if kind == FrameKind.PUSH else self._number()
            given = travelled(request.payloads, request.pieces) if request.pieces else ()
            message = Message(kind, sequence, given, request.pieces, request.pulls, request.lr)
            sent = sum(map(nbytes, request.payloads))
            return self._give(key, rank, message, request.pulls, sent)

    def enter(self, rank: int, x: Tensor, key: str, back: PayloadSpec) -> Tensor:
        """As `ServerClient.enter`."""
        with self._lock:
            self._open(key, back)
            whole = (PayloadSpec(None, x.numel(), x.dtype),)
            for kind in (FrameKind.ENTER, FrameKind.OFFER):
                due = self._give(key, rank, Message(kind, self._number(), ((x.clone(),),)), whole)
                found = due.answer()
                if found:
                    self._clocks[key, rank] = due.clock
                    return found[0][0]
        raise AssertionError("the server has no parameters")

    def leave(self, rank: int) -> None:
        """The worker is gone."""
        with self._lock:
            for key, service in self.services.items():
                sender = Sender(rank, self.lives[rank])
                replies, self.states[key] = service.leave(sender, f"rank {rank} is gone", self.states[key])
                self._hear(key, replies)

    def again(self, rank: int) -> None:
        """The worker begins another life."""
        self.lives[rank] += 1

    def restart(self) -> None:
        """Go on from a checkpoint of this moment, as another process; workers have to enter again."""
        for key, service in self.services.items():
            self.states[key] = service.load(service.save(self.states[key]))
        for rank in range(self.workers):
            self.again(rank)
        self.forget_clocks()
        if self.star.averages:
            for key in self.services:
                self._enter_all(key)

    def forget_clocks(self) -> None:
        """Have workers count their pushes as their server does, as those that it welcomes."""
        self._clocks.clear()
        for key, state in self.states.items():
            self._clocks |= {(key, rank): record.clock for rank, record in enumerate(state.records)}

    def _open(self, key: str, back: PayloadSpec | None) -> None:
        if key in self.services:
            return
        run = RunSpec(self.star, (), ())
        self.services[key] = service_for(run, self.workers, MessageSpec(key, (), (), back))
        self.states[key] = self.services[key].start()
        if self.star.averages:
            self._enter_all(key)

    def _enter_all(self, key: str) -> None:
        for rank in range(self.workers):
            self._give(key, rank, Message(FrameKind.ENTER, self._number()), ())

    def _give(
        self, key: str, rank: int, message: Message, pulls: Sequence[PayloadSpec], sent: int = 0
    ) -> Due:
        sender, due = Sender(rank, self.lives[rank]), Due(pulls, sent)
        self._due[key, sender, message.sequence] = due
        replies, self.states[key] = self.services[key].on(sender, message, self.states[key])
        self._hear(key, replies)
        return due

    def _hear(self, key: str, replies: Iterable[Reply]) -> None:
        for reply in replies:
            due = self._due.pop((key, reply.to, reply.sequence), None)
            if due is None:
                continue
            due.clock = reply.clock or 0
            if reply.refused is not None:
                due.give(reply.refused)
            else:
                due.give(travelled(reply.payloads, due.pulls) if reply.payloads else ())

    def _next(self, key: str, rank: int) -> int:
        self._clocks[key, rank] += 1
        return self._clocks[key, rank]

    def _number(self) -> int:
        self._asked -= 1
        return self._asked


class ServedTransport(LoopbackTransport):
    """A rank's place among the others, and at the server."""

    def __init__(self, net: Loopback, rank: int, server: Served) -> None:
        super().__init__(net, rank)
        self.server, self.rank = server, rank

    def ranks(self, axis: str) -> list[int]:
        return super().ranks(WORLD if axis == SERVER else axis)

    def place(self, axis: str) -> AxisRank:
        return super().place(WORLD if axis == SERVER else axis)

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        if isinstance(request, PushPull):
            return self.server.post(self.rank, request, f"{key}/{stage}")
        return super().post(request, stage, key)


class ServedCrew(Crew):
    """Replicas at a server; `strategy` has a `Star`."""

    server: Served

    def transports(self, peers: int) -> Sequence[ServedTransport]:
        star = self.strategy.server
        assert star is not None
        self.server, net = Served(peers, star), Loopback(peers)
        return [ServedTransport(net, rank, self.server) for rank in range(peers)]

    def enter(self, *ranks: int) -> None:
        """Have these replicas take the server's parameters, where it keeps them; all, where none is given."""
        star = self.strategy.server
        assert star is not None
        for rank in ranks or range(len(self.replicas)):
            self.replicas[rank].progress.enter(
                lambda bucket, x, rank=rank: self.server.enter(rank, x, f"{bucket}/0", star.back(x))
            )
