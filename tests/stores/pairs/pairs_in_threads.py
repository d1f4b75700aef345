"""Replicas in threads that average in pairs, over real sockets of this machine, without torch.distributed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from replica_threads import SIZES, Crew
from torch import Tensor

from tacit.contracts import PairTopology
from tacit.stores.pairs import PairTransport
from tacit.stores.pairs.links import AnsweringLink, AskingLink
from tacit.stores.pairs.members import PairMembers
from tacit.stores.protocol import Channel
from tacit.transports.loopback import Loopback, LoopbackTransport

N = sum(SIZES.values())


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return Channel(one), Channel(other)


class Meeting:
    """The mean over threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._given: defaultdict[tuple[int, ...], list[Sequence[Tensor]]] = defaultdict(list)

    def __call__(self, ranks: Sequence[int], xs: Sequence[Tensor]) -> None:
        who = tuple(ranks)
        with self._lock:
            barrier = self._barriers.setdefault(who, threading.Barrier(len(who)))
            self._given[who].append(xs)
        barrier.wait(30)
        means = [torch.stack(each).mean(0) for each in zip(*self._given[who], strict=True)]
        barrier.wait(30)
        for x, mean in zip(xs, means, strict=True):
            x.copy_(mean)
        barrier.wait(30)
        self._given[who].clear()
        barrier.wait(30)


KNOWN_AS = 10
"""What errors call the first rank: the group is not that of all ranks."""


class PairedCrew(Crew):
    """Replicas of a `PairTopology`.

    Attributes:
        pushed: what each has added to its store so far, in the order of `stored`.
    """

    def __init__(
        self, *args: object, timeout: float = 30.0, sleeps: int | None = None, **more: object
    ) -> None:
        self._timeout = timeout
        self._random = None if sleeps is None else random.Random(sleeps)
        super().__init__(*args, **more)  # type: ignore[arg-type]
        for replica, transport in zip(self.replicas, self.links, strict=True):
            replica.progress.enter(transport.enter)
            session = replica.session
            transport.report_to(session.failure.fail, lambda session=session: session.step)

    def transports(self, peers: int) -> Sequence[LoopbackTransport]:
        topology, store, mean = self.strategy.topology, dist.HashStore(), Meeting()
        assert isinstance(topology, PairTopology)
        known_as = range(KNOWN_AS, KNOWN_AS + peers)
        self.members = [
            PairMembers(store, rank, peers, topology.allow_lost, known_as=known_as) for rank in range(peers)
        ]
        net = Loopback(peers)
        self.links = [
            PairTransport(LoopbackTransport(net, rank), topology, self.members[rank], mean)
            for rank in range(peers)
        ]
        self.pushed = [torch.zeros(N, dtype=torch.float64) for _ in range(peers)]
        for rank, transport in enumerate(self.links):
            self.members[rank].report_to(transport.lose)
            self._count(rank, transport)
            for other in topology.partners(rank, peers):
                here, there = channels()
                self._linked(transport, AskingLink(other, here, transport, self._timeout))
                self._linked(self.links[other], AnsweringLink(rank, there, self.links[other], self._timeout))
        return self.links  # type: ignore[return-value]

    @staticmethod
    def _linked(transport: PairTransport, link: AskingLink | AnsweringLink) -> None:
        transport.connect(link)
        link.start()

    def _count(self, rank: int, transport: PairTransport) -> None:
        push = transport.store.push

        def counted(key: str, delta: Tensor) -> None:
            if self._random is not None:
                time.sleep(self._random.random() * 1e-3)
            at = sum(transport.store.like(before).numel() for before in self._before(transport, key))
            self.pushed[rank][at : at + len(delta)] += delta.double()
            push(key, delta)

        transport.store.push = counted  # type: ignore[method-assign]

    @staticmethod
    def _before(transport: PairTransport, key: str) -> list[str]:
        keys = transport.store.keys
        return keys[: keys.index(key)]

    def stored(self, rank: int) -> Tensor:
        """What a rank's store holds."""
        with self.links[rank].store.held() as buckets:
            return torch.cat(buckets)

    def flat(self, rank: int) -> Tensor:
        """A replica's parameters, in the order of `stored`."""
        replica = self.replicas[rank]
        names = [param.name for bucket in replica.session.buckets for param in bucket.slices]
        return torch.cat([replica.named[name] for name in names])

    def kill(self, rank: int) -> None:
        """As where its process is killed: its sockets are closed."""
        for link in self.links[rank]._links.values():
            link._closing = True
            link._channel.drop()
        self.members[rank]._closing.set()

    def close(self) -> None:
        for transport in self.links:
            transport.close()
        super().close()


def train(crew: PairedCrew, rank: int, steps: int, before: Callable[[int], None] = lambda step: None) -> None:
    """Have one replica take steps, in this thread."""
    replica = crew.replicas[rank]
    for step in range(steps):
        before(step)
        for i, p in enumerate(replica.named.values()):
            p.sub_(0.1 * (p - torch.sin(torch.arange(len(p)) * (1.0 + rank + i) + 0.1 * step).to(p.dtype)))
        replica.progress.after_step()
