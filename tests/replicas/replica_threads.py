"""Replicas of a small parameter vector in threads of one process: periodic strategies without a network.

Nothing here is random: what a replica does in a step is a formula of its rank and step, so that a trajectory
can be worked out by hand, or by a few lines that know nothing of hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from in_threads import in_threads
from tacit.algorithms import parse
from tacit.checkpoint import session_state
from tacit.replicas.fragments import fragments
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session, Training
from tacit.session.buckets import group_names
from tacit.strategy import AnyStrategy, Strategy
from tacit.transports.loopback import Loopback, LoopbackTransport

SIZES = {"a": 7, "b": 3, "c": 5, "d": 6}
LR = 0.1


@dataclass
class Replica:
    """One rank; also what `tacit.checkpoint` keeps of a level."""

    named: dict[str, Tensor]
    session: Session
    progress: OptimizerHook
    strategy: Strategy
    gradient: None = None
    taken: None = None

    @property
    def flat(self) -> Tensor:
        return torch.cat(list(self.named.values()))

    def save(self) -> dict[str, object]:
        self.session.flush()
        saved = session_state.save(self.strategy, [self])
        return saved | {"parameters": {name: p.clone() for name, p in self.named.items()}}

    def load(self, saved: dict[str, object]) -> None:
        for name, p in saved["parameters"].items():  # type: ignore[attr-defined]
            self.named[name].copy_(p)
        session_state.load({k: v for k, v in saved.items() if k != "parameters"}, self.strategy, [self])


def gradient(x: Tensor, rank: int, step: int) -> Tensor:
    """Of a quadratic whose minimum is elsewhere for every rank, and moves."""
    target = torch.sin(torch.arange(len(x)) * (1.0 + rank) + 0.1 * step)
    return x - target


class Crew:
    """Replicas of P ranks, all with the same strategy."""

    def __init__(
        self,
        strategy: str | AnyStrategy,
        peers: int = 3,
        shares: Sequence[float] | None = None,
        schedule_state: dict[str, float] | None = None,
        sizes: Mapping[str, int] = SIZES,
        dtype: torch.dtype = torch.float32,
        start: float = 1.0,
    ) -> None:
        self._sizes, self._dtype, self._start = sizes, dtype, start
        strategy = parse(strategy) if isinstance(strategy, str) else strategy
        (level,) = strategy.levels
        self.strategy: Strategy = level
        transports = self.transports(peers)
        self.replicas = [
            self._replica(level, transport, shares[rank] if shares else 1.0, schedule_state)
            for rank, transport in enumerate(transports)
        ]

    def transports(self, peers: int) -> Sequence[LoopbackTransport]:
        """One for each rank."""
        net = Loopback(peers)
        return [LoopbackTransport(net, rank) for rank in range(peers)]

    def _replica(
        self,
        strategy: Strategy,
        transport: LoopbackTransport,
        share: float,
        schedule_state: dict[str, float] | None,
    ) -> Replica:
        named = {
            name: torch.full((size,), self._start, dtype=self._dtype) for name, size in self._sizes.items()
        }
        buckets = [
            bucket for part in fragments(named, strategy.parts) for bucket in group_names(part, named, cap=40)
        ]
        session = Session(
            strategy,
            named,
            transport,
            buckets,
            policy=lambda *_: strategy.compressor,
            training=Training(rates=lambda: dict.fromkeys(named, LR), schedule_state=schedule_state),
        )
        door = OptimizerHook(session, named, share, lambda: dict.fromkeys(named, LR))
        return Replica(named, session, door, strategy)

    def each(self, work: Callable[[int, Replica], None]) -> None:
        """Have every replica do it, in a thread of its own.

        Raises:
            BaseException: what one of them raised first.
        """
        in_threads(len(self.replicas), lambda rank: work(rank, self.replicas[rank]))

    def train(self, steps: int, loss: Callable[[int], float] | None = None) -> list[list[Tensor]]:
        """The parameters of every rank after each step."""
        trace: list[list[Tensor]] = [[] for _ in self.replicas]

        def work(rank: int, replica: Replica) -> None:
            for _ in range(steps):
                step = replica.session.step
                if loss is not None:
                    replica.progress.observations.observe(loss(step))
                start = 0
                whole = gradient(replica.flat, rank, step)
                for p in replica.named.values():
                    p.sub_(LR * whole[start : start + len(p)])
                    start += len(p)
                replica.progress.after_step()
                trace[rank].append(replica.flat)

        self.each(work)
        return trace

    def save(self) -> list[dict[str, object]]:
        """What each rank keeps, in rank order; all save at once, as some have to agree."""
        saved: list[dict[str, object]] = [{} for _ in self.replicas]

        def work(rank: int, replica: Replica) -> None:
            saved[rank] = replica.save()

        self.each(work)
        return saved

    def sync(self) -> None:
        self.each(lambda _, replica: replica.progress.sync())

    def close(self) -> None:
        for replica in self.replicas:
            replica.session.close()
