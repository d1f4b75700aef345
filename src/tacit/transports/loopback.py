"""N ranks inside one process: for laws and tests, never for claims about networks."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tacit.contracts import (
    NET,
    NODE,
    WORLD,
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    AxisRank,
    Collective,
    Payload,
    Permute,
    Posted,
    PushPull,
    ReduceScatter,
    Request,
    Spans,
    stage_of,
)
from tacit.transports.message_layout import ring_bytes

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
        self._lock = threading.Lock()
        self._posted: defaultdict[tuple[Any, ...], dict[int, tuple[Collective, Answer]]] = defaultdict(dict)

    @classmethod
    def of_nodes(cls, nodes: int, ranks: int) -> Loopback:
        """A network of `nodes` nodes with `ranks` ranks each, which has the axes "node" and "net"."""
        rows = [list(range(i * ranks, (i + 1) * ranks)) for i in range(nodes)]
        return cls(nodes * ranks, {NODE: rows, NET: [list(c) for c in zip(*rows, strict=True)]})

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks that share the axis; none where there is no such axis."""
        return self._groups.get(axis, [])

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that `rank` meets on the axis."""
        return next(group for group in self._groups[axis] if rank in group)

    def run(self, exchanges: Sequence[Generator[Request, Any, T]]) -> list[T]:
        """Drive one exchange a rank to the end; a group is answered when all its members have asked.

        Raises:
            RuntimeError: no group can be answered; the message says which ranks wait for which.
        """
        results: dict[int, T] = {}
        waiting: dict[int, Collective] = {}
        answers: dict[int, Any] = dict.fromkeys(range(self.world))
        while answers or waiting:
            for rank, answer in answers.items():
                try:
                    request = exchanges[rank].send(answer)
                    assert isinstance(request, Collective), (
                        f"a {type(request).__name__} reached the transport"
                    )
                    waiting[rank] = request
                except StopIteration as end:
                    results[rank] = end.value
            answers = self._answer_ready(waiting)
            if waiting and not answers:
                raise RuntimeError(self._deadlock(waiting, results))
            for rank in answers:
                del waiting[rank]
        return [results[rank] for rank in range(self.world)]

    def post(self, rank: int, request: Collective, turn: tuple[int, int]) -> Answer:
        """Post a request; the last rank of the group to post in this turn answers all of them."""
        group = self.group(rank, request.axis)
        answer = Answer(ring_bytes(request, AxisRank(group.index(rank), len(group))))
        with self._lock:
            key = (stage_of(request), tuple(group), *turn)
            here = self._posted[key]
            here[rank] = request, answer
            if len(here) < len(group):
                return answer
            del self._posted[key]
            kinds = {type(each).__name__ for each, _ in here.values()}
            if len(kinds) > 1:
                raise RuntimeError(f"the ranks {group} want {' and '.join(sorted(kinds))} of each other")
            found = self._collective([here[r][0] for r in group], group)
        for r, (_, theirs) in here.items():
            theirs.give(found[r])
        return answer

    def _answer_ready(self, waiting: dict[int, Collective]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for rank, request in waiting.items():
            group = self.group(rank, request.axis)
            kinds = {(type(waiting[r]), waiting[r].axis) for r in group if r in waiting}
            if rank == group[0] and all(r in waiting for r in group) and len(kinds) == 1:
                answers.update(self._collective([waiting[r] for r in group], group))
        return answers

    def _collective(self, requests: list[Collective], group: list[int]) -> dict[int, Any]:
        for i, request in enumerate(requests):
            self.sent[group[i]] += ring_bytes(request, AxisRank(i, len(group)))
            if isinstance(request, AllReduce | ReduceScatter) and request.finite_probe is not None:
                request.finite_probe.add_(sum(t.sum() for t in _given(request)))
        swaps = [request for request in requests if isinstance(request, AllToAll)]
        if swaps:
            return {rank: _addressed_to(i, swaps) for i, rank in enumerate(group)}
        sends = [request for request in requests if isinstance(request, Permute)]
        if sends:
            return _permuted(sends, group)
        if isinstance(requests[0], AllGather):
            copies = [_copied(_given(request)) for request in requests]
            return dict.fromkeys(group, copies)
        if isinstance(requests[0], AllGatherInto):
            _collect([_given(request)[0] for request in requests], requests[0].spans)
        else:
            _mean(requests)
        answers = [
            request.payload if isinstance(request, AllReduce) else _given(request)[0] for request in requests
        ]
        return dict(zip(group, answers, strict=True))

    def _deadlock(self, waiting: dict[int, Collective], results: Mapping[int, object]) -> str:
        lines = []
        for rank, request in sorted(waiting.items()):
            others = []
            for peer in self.group(rank, request.axis):
                if peer in results:
                    others.append(f"rank {peer}, which has ended")
                elif (type(waiting[peer]), waiting[peer].axis) != (type(request), request.axis):
                    theirs = waiting[peer]
                    others.append(f"rank {peer}, which wants {type(theirs).__name__} on {theirs.axis!r}")
            wanted = f"{type(request).__name__} on {request.axis!r}"
            lines.append(f"rank {rank} wants {wanted} and waits for {' and '.join(others)}")
        return "deadlock: " + "; ".join(lines)


def _copied(payload: Payload) -> Payload:
    return tuple(tensor.clone() for tensor in payload)


def _addressed_to(i: int, requests: Sequence[AllToAll]) -> list[Payload]:
    answers = [_copied(each.payloads[i]) for each in requests]
    wanted = requests[i].arriving or [requests[i].payloads[i]] * len(requests)
    for answer, like in zip(answers, wanted, strict=True):
        shapes = [[(t.shape, t.dtype) for t in payload] for payload in (answer, like)]
        assert shapes[0] == shapes[1], "payloads differ in shape from what was to arrive"
    return answers


def _permuted(requests: Sequence[Permute], group: Sequence[int]) -> dict[int, Payload | None]:
    assert len({request.to for request in requests}) == 1, "the ranks disagree about who sends to whom"
    sources = [request.comes_from(i) for i, request in enumerate(requests)]
    # All copied before any is written: `into` may be part of what another rank sends.
    copies = [None if source is None else _copied(requests[source].payload) for source in sources]
    return {rank: _taken(*pair) for rank, pair in zip(group, zip(requests, copies, strict=True), strict=True)}


def _taken(request: Permute, payload: Payload | None) -> Payload | None:
    if payload is None:
        return None
    for mine, tensor in zip(request.arriving, payload, strict=True):
        assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype), "payloads differ in shape"
    for mine, tensor in zip(request.into, payload, strict=bool(request.into)):
        mine.copy_(tensor)
    return request.into or payload


def _given(request: Collective) -> tuple[torch.Tensor, ...]:
    assert not isinstance(request, AllToAll | Permute | PushPull)
    return request.payload if isinstance(request, AllReduce | AllGather) else (request.x,)


def _mean(requests: list[Collective]) -> None:
    columns = list(zip(*map(_given, requests), strict=True))
    means = [torch.stack([t / len(requests) for t in column]).sum(0) for column in columns]
    for i, request in enumerate(requests):
        for tensor, mean in zip(_given(request), means, strict=True):
            start, stop = request.spans[i] if isinstance(request, ReduceScatter) else (0, len(tensor))
            tensor[start:stop] = mean[start:stop]


def _collect(tensors: list[torch.Tensor], spans: Spans) -> None:
    for owner, (start, stop) in zip(tensors, spans, strict=True):
        for tensor in tensors:
            tensor[start:stop] = owner[start:stop]


class Answer(Posted):
    """The answer for which a rank's thread waits; `sent`: see `Posted`."""

    def __init__(self, sent: int = 0) -> None:
        self.sent = sent
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._given: list[Any] = []

    def give(self, answer: Any) -> None:
        """Set the answer."""
        with self._lock:
            self._given.append(answer)
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    @property
    def done(self) -> bool:
        """Whether the answer is set."""
        return bool(self._given)

    def on_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._given:
                self._calls.append(call)
                return
        call()

    def answer(self) -> Any:
        return self._given[0]


class LoopbackTransport:
    """The transport of one rank in a `Loopback`.

    One thread drives all ranks' exchanges by `Loopback.run`; or each rank has a thread, and posts.
    """

    def __init__(self, net: Loopback, rank: int) -> None:
        self._net, self._rank = net, rank
        self._turns: Counter[tuple[str, int]] = Counter()

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        return self._net.groups(NODE)

    def open(self, stages: Mapping[str, int]) -> None:
        """Nothing to do."""

    def ranks(self, axis: str) -> list[int]:
        """The ranks that share the axis with this one."""
        return self._net.group(self._rank, axis)

    def place(self, axis: str) -> AxisRank:
        """This rank's position on the axis."""
        ranks = self.ranks(axis)
        return AxisRank(ranks.index(self._rank), len(ranks))

    def global_rank(self, replica: int) -> int:
        """The replica's number: there are no other processes."""
        return replica

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Post a request, answered with those of the other ranks in the same turn of axis and stage."""
        turn = stage_of(request), stage
        self._turns[turn] += 1
        return self._net.post(self._rank, request, (stage, self._turns[turn]))
