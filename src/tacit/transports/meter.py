"""Rehearses an exchange without a network or data: shapes and bytes only, on meta tensors."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.contracts import Gather, Mean, Request
from tacit.transports.wire import ring_gather, ring_mean

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
        stages: how many times the exchange speaks.
    """

    sent: dict[str, int]
    stages: int


def rehearse(exchange: Generator[Request, Any, T], peers: int) -> tuple[T, Bill]:
    """Drive an exchange over meta tensors among `peers` ranks; its result, and what it costs."""
    bill = Bill({}, 0)
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            return end.value, bill
        assert isinstance(request, Mean | Gather), f"a {type(request).__name__} reached the meter"
        bill.stages += 1
        formula = ring_mean if isinstance(request, Mean) else ring_gather
        bill.sent[request.axis] = bill.sent.get(request.axis, 0) + formula(request.payload, peers)
        answer = request.payload if isinstance(request, Mean) else [request.payload] * peers
