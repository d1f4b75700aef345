"""Counts what exchanges send: in earnest, or rehearsed without a network or data, on meta tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.contracts import (
    Ask,
    Collect,
    Collective,
    Context,
    Deal,
    Gather,
    Mean,
    Payload,
    Piece,
    Place,
    Request,
    Scatter,
    Send,
)
from tacit.transports.wire import ring_bytes

T = TypeVar("T")


class Rehearsal:
    """A workspace that makes meta tensors and remembers what it was asked for."""

    def __init__(self) -> None:
        self.scratched: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        """A meta tensor like the state field."""
        return torch.empty_like(like, device="meta")

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A meta tensor; the request is noted."""
        self.scratched[key] = (tuple(shape), dtype)
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


@dataclass
class Bill:
    """What a rehearsed exchange costs.

    Attributes:
        sent: bytes that this rank sends, by axis.
        stages: how many times the exchange speaks, by axis.
    """

    sent: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)


def rehearse(exchange: Generator[Request, Any, T], place: Callable[[str], Place]) -> tuple[T, Bill]:
    """Drive an exchange over meta tensors at this place on each axis; its result, and what it costs."""
    bill = Bill()
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            return end.value, bill
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the meter"
        here = place(request.axis)
        bill.stages[request.axis] += 1
        bill.sent[request.axis] += ring_bytes(request, here)
        answer = _as_if(request, here)


def counted(
    exchange: Generator[Request, Any, T], place: Callable[[str], Place]
) -> Generator[Request, Any, tuple[T, int]]:
    """Run `exchange`; its result, and the bytes that this rank has sent in it, by formulas."""
    sent, answer = 0, None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            return end.value, sent
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the meter"
        sent += ring_bytes(request, place(request.axis))
        answer = yield request


def _as_if(request: Collective, here: Place) -> Any:
    match request:
        case Mean(payload):
            return payload
        case Gather(payload):
            return [payload] * here.peers
        case Scatter(x) | Collect(x):
            return x
        case Deal(payloads):
            return [payloads[here.rank]] * here.peers
        case Ask():
            return tuple(like(piece) for piece in request.pulls)
        case Send(payload):
            return None if request.comes_from(here.rank) is None else payload


@cache
def like(piece: Piece) -> Payload:
    """A payload that the piece reads, on meta tensors."""
    x = torch.empty(piece.numel, dtype=piece.dtype, device="meta")
    return (x,) if piece.codec is None else piece.codec.encode(x, Context(out=x, work=Rehearsal(), peers=1))
