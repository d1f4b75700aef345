"""Counts what exchanges send: real ones, or dry runs on meta tensors without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    AxisRank,
    Collective,
    NoMemory,
    Payload,
    PayloadSpec,
    Permute,
    PushPull,
    ReduceScatter,
    Request,
    payload_like,
)
from tacit.transports.message_layout import given_bytes, ring_bytes

T = TypeVar("T")


class DryRun(NoMemory):
    """A workspace that returns meta tensors and records the requested buffers."""

    def __init__(self) -> None:
        self.scratched: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def ask_again(self, scratched: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Record the buffers that another dry run of the same exchange requested."""
        self.scratched |= scratched

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A meta tensor; the request is recorded."""
        self.scratched[key] = (tuple(shape), dtype)
        return super().scratch(key, like, shape, dtype)


class SentMessage(NamedTuple):
    """One collective of an exchange, as a rank takes part in it.

    Attributes:
        kind: the request's class.
        size: bytes of this rank's input.
        sent: bytes that it sends, by the formulas of ring collectives.
        to: of a `Permute`: for each peer, the rank that receives its payload.
    """

    kind: str
    axis: str
    size: int
    sent: int
    to: tuple[int | None, ...] = ()


@dataclass
class Cost:
    """The cost of an exchange, by a dry run.

    Attributes:
        sent: bytes that this rank sends, by axis.
        stages: the number of collectives by axis, as for `Transport.open`: a `Permute` does not count, but if
            there are only these it is 1.
        messages: each collective, in order.
    """

    sent: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    messages: list[SentMessage] = field(default_factory=list)


def run_dry(exchange: Generator[Request, Any, T], place: Callable[[str], AxisRank]) -> tuple[T, Cost]:
    """Run an exchange on meta tensors, at a position on each axis. Returns its result and its cost."""
    cost = Cost()
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            for axis in {each.axis for each in cost.messages}:
                cost.stages[axis] = max(1, cost.stages[axis])
            return end.value, cost
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the meter"
        here = place(request.axis)
        cost.stages[request.axis] += not isinstance(request, Permute)
        cost.sent[request.axis] += (sent := ring_bytes(request, here))
        to = request.to if isinstance(request, Permute) else ()
        cost.messages.append(
            SentMessage(type(request).__name__, request.axis, given_bytes(request), sent, to)
        )
        answer = as_if(request, here)


def as_if(request: Collective, here: AxisRank) -> Any:
    """An answer with the shapes of the peers': made of this rank's input."""
    match request:
        case AllReduce(payload):
            return payload
        case AllGather(payload):
            return [payload] * here.peers
        case ReduceScatter(x) | AllGatherInto(x):
            return x
        case AllToAll(payloads):
            if request.arriving:
                return list(request.arriving)
            return [payloads[here.rank]] * here.peers
        case PushPull():
            return tuple(like(piece) for piece in request.pulls)
        case Permute():
            return None if request.comes_from(here.rank) is None else request.arriving


def like(piece: PayloadSpec) -> Payload:
    """A payload of this format, on meta tensors."""
    if piece.codec is None:
        return (torch.empty(piece.numel, dtype=piece.dtype, device="meta"),)
    return payload_like(piece.codec, piece.numel, piece.dtype)
