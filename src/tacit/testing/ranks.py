"""Ranks of a strategy in this process, with a parameter server that averages where they have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tacit.compressors import Dense
from tacit.contracts import (
    SERVER,
    WORLD,
    Collective,
    Payload,
    PushPull,
    Request,
    Topology,
    stage_of,
)
from tacit.session import Session
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.server.averaging_service import AveragingService, AveragingState
from tacit.stores.service import Sender
from tacit.strategy import Strategy
from tacit.transports.loopback import Answer, Loopback, LoopbackTransport


class FreshBuffers:
    """Buffers that are allocated on request, filled with values that must not be read."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """A tensor like `like`, full of NaN or 77."""
        return torch.full_like(like, torch.nan if like.is_floating_point() else 77)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor of that shape and type."""
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)


class RankWithServer(LoopbackTransport):
    """A rank that also has a parameter server."""

    def ranks(self, axis: str) -> list[int]:
        """On the servers' axis, all workers."""
        return super().ranks(WORLD if axis == SERVER else axis)


class RanksInProcess:
    """Sessions of all ranks of a world with one strategy, and a server that averages where it has one."""

    def __init__(
        self, strategy: Strategy, world: int, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        by_node = strategy.topology.scope != strategy.topology.meets
        nodes = 2 if by_node and world % 2 == 0 else 1
        self.net = Loopback.of_nodes(nodes, world // nodes) if by_node else Loopback(world)
        named = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self._strategy, self._dtype = strategy, dtype
        self.sessions = [
            Session(strategy, named, RankWithServer(self.net, rank), [[*named]]) for rank in range(world)
        ]
        self.first = next(iter(named))
        self.numel = sum(p.numel() for p in named.values())
        (bucket,) = self.sessions[0].buckets
        self._service = AveragingService(world, bucket.name)
        self._served: AveragingState = self._service.start()
        for rank in range(world):
            _, self._served = self._service.on(Sender(rank, 1), Message(FrameKind.ENTER), self._served)
        self._asked: dict[int, Answer] = {}
        self._pushes = 0

    @property
    def candidates(self) -> list[Topology]:
        """The topologies that the sessions have chosen from, or the only one there is."""
        choice = self.sessions[0].choice
        return [*choice.sent] or [choice.topology]

    @property
    def keeps_residuals(self) -> bool:
        """Whether each parameter's compressor keeps what it does not send, or sends all of it exactly."""
        chosen = self.sessions[0].buckets[0].chosen
        uses = [each.one_shot(0) for each in chosen]
        exact = [each == Dense() for each in chosen]
        owing = [use is not None and use.has_feedback for use in uses]
        return any(owing) and all(a or b for a, b in zip(owing, exact, strict=True))

    @property
    def rounding(self) -> float:
        """The relative error that averaging on the way may make, in the type that travels."""
        uses = [each.one_shot(0) for each in self.sessions[0].buckets[0].chosen]
        adds = [use.codec for use in uses if use is not None and use.codec.additive]
        return 1e-4 if all(codec == Dense() for codec in adds) else 1e-2

    def tensors(self, seed: int) -> list[Tensor]:
        """One gradient a rank."""
        return [heavy_tailed(self.numel, self._dtype, 97 * seed + rank) for rank in range(len(self.sessions))]

    def exchange(self, xs: list[Tensor]) -> Tensor:
        """One round; the mean, which must be the same bits on all ranks."""
        self._pushes = self._served.number
        outcomes = self._run([session.open(0, x) for session, x in zip(self.sessions, xs, strict=True)])
        for session, outcome in zip(self.sessions, outcomes, strict=True):
            session.complete(0, outcome)
        assert all(torch.equal(x, xs[0]) for x in xs), "ranks have got different means"
        return xs[0]

    def residual(self) -> Tensor:
        """The part of the inputs that has not arrived, in units of the mean."""
        total = torch.zeros(self.numel, dtype=torch.float64)
        parties = self.sessions[0].context.coordinate.here.peers
        starts = {each.name: each.start for each in self.sessions[0].buckets[0].slices}
        for session in self.sessions:
            for (name, kind), kept in session.store.named_state().items():
                if kind.startswith("topology.") or kind in session.store.residuals(name):
                    start = starts[name] + kept.start
                    share = 1.0 if kind.startswith("topology.") else 1.0 / parties
                    total[start : start + kept.tensor.numel()] += share * kept.tensor.double()
        return total

    def _run(self, exchanges: Sequence[Generator[Request, Any, Any]]) -> list[Any]:
        """Drive one exchange a rank to the end."""
        results: dict[int, Any] = {}
        waiting: dict[int, Answer] = {}
        stages = [Counter[str]() for _ in exchanges]
        ready: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
        while ready:
            for rank, answer in ready.items():
                try:
                    request = exchanges[rank].send(answer)
                except StopIteration as end:
                    results[rank] = end.value
                    continue
                assert isinstance(request, Collective), f"a {type(request).__name__} reached the transport"
                stages[rank][stage_of(request)] += 1
                waiting[rank] = self._post(rank, request, stages[rank][stage_of(request)])
            ready = {rank: each.answer() for rank, each in waiting.items() if each.done}
            for rank in ready:
                del waiting[rank]
        assert not waiting, f"ranks {sorted(waiting)} wait for others that have ended, or ask something else"
        return [results[rank] for rank in range(len(exchanges))]

    def _post(self, rank: int, request: Collective, stage: int) -> Answer:
        if not isinstance(request, PushPull):
            return self.net.post(rank, request, (stage, 0))
        self._asked[rank] = answer = Answer()
        push = Message(
            FrameKind.PUSH, stage + self._pushes, _copies(request.payloads), request.pieces, request.pulls
        )
        replies, self._served = self._service.on(Sender(rank, 1), push, self._served)
        for reply in replies:
            if reply.refused is not None:
                raise reply.refused
            self._asked[reply.to.worker].give(_copies(reply.payloads))
        return answer


def _copies(payloads: Iterable[Payload]) -> tuple[Payload, ...]:
    return tuple(tuple(part.clone() for part in payload) for payload in payloads)


def heavy_tailed(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Heavy-tailed, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) ** 3).to(dtype)


@contextmanager
def naming(*what: object) -> Iterator[None]:
    """Add to an error, also one of the checked code, under which circumstances a law does not hold."""
    try:
        yield
    except Exception as error:
        why = str(error)
        if not isinstance(error, AssertionError):
            why = f"it has raised a {type(error).__name__}: {error}"
        raise AssertionError(f"{', '.join(map(str, what))}: {why}") from error
