"""A transport of a single rank: each collective is answered at once, as if all peers had the same input.

So the computing of a strategy on a rank can be measured without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import (
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
)
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import divide_
from tacit.moments import Moment, Watch
from tacit.transports.message_layout import empty_message, pack_, ring_bytes, unpack


@dataclass(frozen=True)
class Layout:
    """The nodes and ranks of a cluster, as its first rank sees them.

    Attributes:
        count: the number of nodes.
        each: the number of ranks of each.
    """

    count: int
    each: int

    @cached_property
    def nodes(self) -> Sequence[Sequence[int]]:
        """The ranks of each node."""
        return [range(node * self.each, (node + 1) * self.each) for node in range(self.count)]

    def ranks(self, axis: str) -> Sequence[int]:
        """The ranks on this axis with this one."""
        if axis == WORLD:
            return range(self.count * self.each)
        return range(self.each) if axis == NODE else range(0, self.count * self.each, self.each)

    def place(self, axis: str) -> AxisRank:
        """This rank on the axis."""
        return AxisRank(0, len(self.ranks(axis)))

    def global_rank(self, replica: int) -> int:
        """The replica's number: there are no other processes."""
        return replica

    def open(self, stages: Mapping[str, int]) -> None:
        """Nothing to do."""

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Refuse: a layout has no transport."""
        raise AssertionError("a layout carries nothing")


@dataclass(eq=False)
class _Answered:
    value: Any
    taken: Callable[[], None]
    sent: int

    def on_done(self, call: Callable[[], None]) -> None:
        call()

    def answer(self) -> Any:
        self.taken()
        return self.value


@dataclass(frozen=True)
class EchoTransport(Layout):
    """One rank of a cluster whose peers have the same input.

    Messages are packed and unpacked as for torch.distributed; nothing is sent.

    Attributes:
        watch: reads the clocks; by default the process's processor time.
        marks: for each answered collective the key of its exchange, and the moments when it was posted and
            when its answer was read. The echo's work is between the two.
    """

    watch: Watch = field(default_factory=Watch)
    marks: list[tuple[str, Moment, Moment]] = field(default_factory=list, compare=False)

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Answer a collective at once.

        Raises:
            ConfigError: it is for a parameter server, whose work is not simulated.
        """
        if isinstance(request, PushPull):
            raise ConfigError("what a parameter server does is not measured in a worker")
        here = self.place(request.axis)
        answer, posted = _answered(request, here, self.watch)
        mark = lambda: self.marks.append((key, posted, self.watch.now()))  # noqa: E731
        return _Answered(answer, mark, ring_bytes(request, here))


def _answered(request: Collective, here: AxisRank, watch: Watch) -> tuple[Any, Moment]:
    """The answer; and the moment at which a transport would have started the collective."""
    match request:
        case AllReduce(payload):
            flat = payload[0]
            if len(payload) > 1:
                message = empty_message(payload)
                pack_(payload, message)
                flat = message.view(payload[0].dtype)
            divide_(flat, here.peers, request.finite_probe)
            at = watch.now()
            for tensor in payload:  # the peers' sum is as large as the mean of one
                tensor.mul_(here.peers)
            return payload, at
        case AllGather(payload):
            at = _packed(payload, watch)
            return _copies(payload, here.peers), at
        case AllToAll(payloads):
            at = _packed(tuple(t for payload in payloads for t in payload), watch)
            if request.arriving:
                return [tuple(map(torch.zeros_like, each)) for each in request.arriving], at
            return _copies(payloads[here.rank], here.peers), at
        case ReduceScatter(x, spans):
            at = watch.now()
            start, stop = spans[here.rank]
            _add_up(x[start:stop], here.peers)
            return x, at
        case AllGatherInto(x):
            return x, watch.now()
        case Permute(payload):
            at = _packed(payload, watch)
            nobody = request.comes_from(here.rank) is None
            return (None if nobody else request.into or _copies(payload, 1)[0]), at
    raise AssertionError(f"a {type(request).__name__} has no echo")


def _packed(payload: Payload, watch: Watch) -> Moment:
    pack_(payload, empty_message(payload))
    return watch.now()


def _copies(payload: Payload, count: int) -> list[Payload]:
    message = empty_message(payload)
    pack_(payload, message)
    return [unpack(message.clone(), payload) for _ in range(count)]


def _add_up(x: Tensor, peers: int) -> None:
    """Add up copies, as a reduce-scatter adds up what has arrived."""
    arrived = x.clone()
    torch.div(arrived, peers, out=x)
    for _ in range(peers - 1):
        x.add_(arrived, alpha=1 / peers)
