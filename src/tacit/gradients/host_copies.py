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
    """Copies between a GPU and pinned memory, on two separate streams: one down, one up.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._down, self._up = (cuda.Stream(device) for _ in range(2))

    @staticmethod
    def of(session: Session, named: Mapping[str, Tensor]) -> HostCopies | None:
        """The copies for a session; None if buckets are exchanged on the parameters' device."""
        there = {p.device for p in named.values() if p.is_cuda}
        if not there or not session.buckets or session.buckets[0].device.type != "cpu":
            return None
        return HostCopies(there.pop())

    def pinned(self, bucket: Bucket) -> Tensor:
        """Pinned memory on the host for a bucket."""
        return torch.empty(bucket.numel, dtype=bucket.dtype, pin_memory=True)

    def down(self, here: Tensor, there: Tensor) -> None:
        """Begin to copy a tensor to the host, after what this thread's stream has written."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            there.copy_(here, non_blocking=True)

    def arrived(self) -> Callable[[], None]:
        """A function that waits for all copies to the host that have begun."""
        wait: Callable[[], None] = self._down.record_event().synchronize
        return wait

    def up(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy to the GPU; `pieces`: pairs of a tensor on the GPU and one on the host."""
        with self.inside():
            for here, there in pieces:
                here.copy_(there, non_blocking=True)

    def inside(self) -> AbstractContextManager[object]:
        """A block whose launches come after the copies to the GPU."""
        return torch.cuda.stream(self._up)
