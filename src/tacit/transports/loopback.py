"""N ranks inside one process: for laws and tests, never for claims about networks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tacit.contracts import WORLD, Gather, Mean, Posted, Request
from tacit.transports.wire import ring_gather, ring_mean

T = TypeVar("T")


class Loopback:
    """A network of `world` ranks in this process.

    Args:
        world: the number of ranks.
        axes: axis name -> groups of ranks that share it; the axis "world" always is there.
    """

    def __init__(self, world: int, axes: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        self.world = world
        self._groups = {WORLD: [list(range(world))]} | {
            k: [list(g) for g in v] for k, v in (axes or {}).items()
        }
        self.sent = [0] * world
        """Bytes that each rank has sent, by the formulas of ring collectives."""

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that `rank` meets on the axis."""
        return next(group for group in self._groups[axis] if rank in group)

    def run(self, exchanges: Sequence[Generator[Request, Any, T]]) -> list[T]:
        """Drive one exchange a rank to the end; a group is answered when all its members have asked.

        Raises:
            RuntimeError: no group can be answered: says who waits for whom.
        """
        results: dict[int, T] = {}
        waiting: dict[int, Mean | Gather] = {}
        answers: dict[int, Any] = dict.fromkeys(range(self.world))
        while answers or waiting:
            for rank, answer in answers.items():
                try:
                    wish = exchanges[rank].send(answer)
                    assert isinstance(wish, Mean | Gather), f"a {type(wish).__name__} reached the transport"
                    waiting[rank] = wish
                except StopIteration as end:
                    results[rank] = end.value
            answers = self._answer_ready(waiting)
            if waiting and not answers:
                raise RuntimeError(self._deadlock(waiting, results))
            for rank in answers:
                del waiting[rank]
        return [results[rank] for rank in range(self.world)]

    def _answer_ready(self, waiting: dict[int, Mean | Gather]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for rank, wish in waiting.items():
            group = self.group(rank, wish.axis)
            kinds = {(type(waiting[r]), waiting[r].axis) for r in group if r in waiting}
            if rank == group[0] and all(r in waiting for r in group) and len(kinds) == 1:
                answers.update(self._collective([waiting[r] for r in group], group))
        return answers

    def _collective(self, wishes: list[Mean | Gather], group: list[int]) -> dict[int, Any]:
        payloads = [wish.payload for wish in wishes]
        if isinstance(wishes[0], Gather):
            copies = [tuple(t.clone() for t in payload) for payload in payloads]
            self._count(group, ring_gather(payloads[0], len(group)))
            return dict.fromkeys(group, copies)
        for wish in wishes:
            if isinstance(wish, Mean) and wish.total is not None:
                wish.total.add_(sum(t.sum() for t in wish.payload))
        means = [torch.stack([t / len(group) for t in each]).sum(0) for each in zip(*payloads, strict=True)]
        self._count(group, ring_mean(payloads[0], len(group)))
        for payload in payloads:
            for tensor, mean in zip(payload, means, strict=True):
                tensor.copy_(mean)
        return dict(zip(group, payloads, strict=True))

    def _count(self, group: list[int], size: int) -> None:
        for rank in group:
            self.sent[rank] += size

    def _deadlock(self, waiting: dict[int, Mean | Gather], results: Mapping[int, object]) -> str:
        lines = []
        for rank, wish in sorted(waiting.items()):
            others = []
            for peer in self.group(rank, wish.axis):
                if peer in results:
                    others.append(f"rank {peer}, which has ended")
                elif (type(waiting[peer]), waiting[peer].axis) != (type(wish), wish.axis):
                    theirs = waiting[peer]
                    others.append(f"rank {peer}, which wants {type(theirs).__name__} on {theirs.axis!r}")
            wanted = f"{type(wish).__name__} on {wish.axis!r}"
            lines.append(f"rank {rank} wants {wanted} and waits for {' and '.join(others)}")
        return "deadlock: " + "; ".join(lines)


class Seat:
    """One rank's place in a `Loopback`, for what asks who it is; exchanges are driven by `Loopback.run`."""

    def __init__(self, net: Loopback, rank: int) -> None:
        self._net, self._rank = net, rank

    def peers(self, axis: str) -> int:
        """How many ranks the axis has."""
        return len(self._net.group(self._rank, axis))

    def rank(self, axis: str) -> int:
        """This rank's place on the axis."""
        return self._net.group(self._rank, axis).index(self._rank)

    def post(self, request: Mean | Gather, stage: int, slot: str) -> Posted:
        """Not possible here: a rank alone cannot drive the others."""
        raise RuntimeError("a loopback answers all ranks at once: drive the exchanges with Loopback.run")
