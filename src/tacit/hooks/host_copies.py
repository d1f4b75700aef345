"""Gradients of a model on a GPU that are exchanged on the host: copied there and back meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tacit.session import Session
from tacit.session.buckets import Bucket


class HostCopies:
    """Copies between a GPU and pinned memory, on two streams of their own: one down, one up.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._down, self._up = (cuda.Stream(device) for _ in range(2))

    @staticmethod
    def of(session: Session, named: Mapping[str, Tensor]) -> HostCopies | None:
        """None where buckets are exchanged where the parameters are."""
        there = {p.device for p in named.values() if p.is_cuda}
        if not there or not session.buckets or session.buckets[0].device.type != "cpu":
            return None
        return HostCopies(there.pop())

    def pinned(self, bucket: Bucket) -> Tensor:
        """Where a bucket is put together on the host."""
        return torch.empty(bucket.numel, dtype=bucket.dtype, pin_memory=True)

    def down(self, here: Tensor, there: Tensor) -> None:
        """Copy to the host what this thread's stream has written; not waited for."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            there.copy_(here, non_blocking=True)

    def arrived(self) -> Callable[[], None]:
        """What waits until all that is on its way down has arrived."""
        wait: Callable[[], None] = self._down.record_event().synchronize
        return wait

    def up(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (on the GPU, on the host) up; not waited for."""
        with self.inside():
            for here, there in pieces:
                here.copy_(there, non_blocking=True)

    def inside(self) -> AbstractContextManager[object]:
        """What is launched inside the block comes behind the copies up."""
        return torch.cuda.stream(self._up)
