"""Workers and a service without a network: a scheduler that replays any order of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tacit.compressors import Dense
from tacit.contracts import PayloadSpec
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.service import Reply, Sender, Service

N = 6
PIECE = PayloadSpec(Dense(), N, torch.float32)
BACK = PayloadSpec(None, N, torch.float32)


ENTER = Message(FrameKind.ENTER)


def offer(x: Tensor) -> Message:
    return Message(FrameKind.OFFER, payloads=((x,),))


def push(x: Tensor, lr: float = 0.0, sequence: int = 1) -> Message:
    piece, back = replace(PIECE, dtype=x.dtype), replace(BACK, dtype=x.dtype)
    return Message(FrameKind.PUSH, sequence, ((x.clone(),),), (piece,), (back,), lr)


@dataclass
class Worker:
    """Pushes one-hot markers, so that what was applied can be counted: entry w counts worker w's pushes."""

    number: int
    incarnation: int = 0
    clock: int = 0
    busy: bool = False
    alive: bool = False
    has: Tensor | None = None
    refused: list[Exception] = field(default_factory=list)
    pushed: int = 0
    stale: list[int] = field(default_factory=list)

    @property
    def sender(self) -> Sender:
        return Sender(self.number, self.incarnation)


class World:
    """A service and its workers; `act` takes one step of one of them."""

    def __init__(self, service: Service[Any], workers: int, start: Tensor | None = None) -> None:
        self.service, self.state = service, service.start()
        self.workers = [Worker(i) for i in range(workers)]
        self.start = torch.zeros(N) if start is None else start
        self.order: list[int] = []

    def send(self, worker: Worker, message: Message) -> None:
        replies, self.state = self.service.on(worker.sender, message, self.state)
        self.hear(replies)

    def hear(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            worker = self.workers[reply.to.worker]
            if not worker.alive or reply.to != worker.sender:
                continue
            if reply.offer:
                self.send(worker, replace(offer(self.start), sequence=1))
                continue
            assert worker.busy, "answered twice"
            worker.busy = False
            if reply.refused is not None:
                worker.refused.append(reply.refused)
                continue
            self.order.append(worker.number)
            if reply.payloads:
                worker.has = reply.payloads[0][0].clone()
            worker.clock = worker.clock if reply.clock is None else reply.clock
            if reply.stale is not None:
                worker.stale.append(reply.stale)

    def enter(self, i: int) -> None:
        worker = self.workers[i]
        worker.incarnation, worker.alive, worker.busy = worker.incarnation + 1, True, True
        self.send(worker, ENTER)

    def push(self, i: int, x: Tensor) -> None:
        worker = self.workers[i]
        worker.clock, worker.pushed, worker.busy = worker.clock + 1, worker.pushed + 1, True
        self.send(worker, push(x, sequence=worker.clock))

    def meet(self, i: int) -> None:
        self.workers[i].busy = True
        self.send(self.workers[i], Message(FrameKind.MEET))

    def kill(self, i: int) -> None:
        worker = self.workers[i]
        worker.alive = worker.busy = False
        replies, self.state = self.service.leave(worker.sender, f"rank {i} is gone", self.state)
        self.hear(replies)


def one(i: int) -> Tensor:
    return torch.eye(N)[i]
