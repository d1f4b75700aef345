"""Gradients that are averaged between backward and step, so that a round that fails can be made again.

Where replicas come and go, DDP's hook would be too early: what it has answered stands in the gradients. Here
they are copied, and overwritten when all means are there. The exchange does not overlap with backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from tacit.gradients.ddp_hook import BucketFuture, HookDispatcher
from tacit.session import Session
from tacit.session.buckets import group_names
from tacit.torch_compat import GradBucket


class StepGradients:
    """The gradients of a replica that is a process of its own.

    Args:
        dispatcher: exchanges a bucket, as DDP's hook.
        named: the parameters.
        cap: the most bytes of a bucket.
    """

    def __init__(self, dispatcher: HookDispatcher, named: Mapping[str, Tensor], cap: int) -> None:
        self._dispatcher = dispatcher
        names = group_names([*named][::-1], named, cap)
        self._params = [[named[name] for name in each] for each in names]
        self._buffers = [
            torch.empty(sum(p.numel() for p in each), dtype=each[0].dtype, device=each[0].device)
            for each in self._params
        ]
        self._parts = [
            (p, part.view(p.shape))
            for params, buffer in zip(self._params, self._buffers, strict=True)
            for p, part in zip(params, torch.split(buffer, [p.numel() for p in params]), strict=True)
        ]

    def average(self, session: Session) -> None:
        """Overwrite the gradients with their means over the members. A collective call.

        Raises:
            RoundError: it failed, and no gradient has changed.
        """
        for p, part in self._parts:
            part.zero_() if p.grad is None else part.copy_(p.grad)
        futures: list[BucketFuture] = []
        last = len(self._params) - 1

        def exchange(_: Tensor) -> None:
            for i, (params, buffer) in enumerate(zip(self._params, self._buffers, strict=True)):
                bucket: Any = _Bucket(i, i == last, params, buffer)
                futures.append(self._dispatcher.answer(cast(GradBucket, bucket)))

        with torch.enable_grad():
            begun = torch.zeros((), dtype=torch.float32, requires_grad=True).clone()
        # The dispatcher counts on being called in a backward.
        begun.register_hook(exchange)  # type: ignore[no-untyped-call]
        begun.backward()  # type: ignore[no-untyped-call]
        for each in futures:
            each.wait()
        session.failure.raise_first()
        for p, part in self._parts:
            if p.grad is not None:
                p.grad.copy_(part)
            elif bool(part.any()):  # others have used it
                p.grad = part.clone()


class _Bucket:
    """A bucket with the interface of torch's `GradBucket`."""

    def __init__(self, number: int, last: bool, params: list[Tensor], flat: Tensor) -> None:
        self._number, self._last, self._params, self._flat = number, last, params, flat

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[Tensor]:
        return self._params

    def buffer(self) -> Tensor:
        return self._flat
