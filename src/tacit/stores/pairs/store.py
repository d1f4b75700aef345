"""A rank's averaged parameters, in addition to those that it trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tacit.contracts import state_dtype


class ReplicaStore:
    """The parameters of a rank, bucket by bucket, in float32 at least. Any thread may call any method.

    An average of two stores is three calls. One rank sends the result of `read`. The other `answer`s: it
    moves half the distance towards that, and sends the difference back. The first `take`s it: it moves by as
    much in the other direction. What was pushed to either in the meantime is added.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stored: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}

    @property
    def keys(self) -> list[str]:
        """The buckets, in the order in which they were entered first; the same on all ranks."""
        return list(self._stored)

    def enter(self, key: str, x: Tensor) -> None:
        """Begin with these parameters of a bucket, or begin anew."""
        with self._lock:
            self._stored[key] = x.to(state_dtype(x.dtype), copy=True)
            self._types[key] = x.dtype

    def like(self, key: str) -> Tensor:
        """An uninitialised tensor for the bucket, as it travels."""
        return torch.empty(self._stored[key].shape, dtype=self._types[key])

    def push(self, key: str, delta: Tensor) -> None:
        """Add the change by the rank's steps."""
        with self._lock:
            self._stored[key].add_(delta)

    def read(self, key: str, out: Tensor) -> Tensor:
        """Overwrite `out` with the parameters; returns it."""
        with self._lock:
            return out.copy_(self._stored[key])

    def answer(self, key: str, theirs: Tensor, out: Tensor, start: int = 0) -> Tensor:
        """Average with a rank that has these parameters: overwrites `out` by how far this one has moved.

        `start`: their first entry in the bucket, of which they may be a part.
        """
        with self._lock:
            x = self._stored[key][start : start + theirs.numel()]
            out.copy_(theirs.to(x.dtype).mul_(0.5).sub_(x, alpha=0.5))
            x.add_(out)
        return out

    def take(self, key: str, moved: Tensor) -> None:
        """Move by as much as the answering rank, in the other direction."""
        with self._lock:
            self._stored[key].sub_(moved)

    @contextmanager
    def held(self) -> Iterator[list[Tensor]]:
        """The parameters of all buckets, to be overwritten; whoever else wants something waits."""
        with self._lock:
            yield list(self._stored.values())
