"""Measure training: seconds and bytes between nodes, inside windows that leave evaluation out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tacit.environment import INTERFACE, NODES
from tacit_lab.recipes import traffic
from tacit_lab.testbed.network import counters


class Meter:
    """Counts seconds and transmitted bytes, summed over its windows. All ranks must make the same calls.

    Args:
        beside: returns the bytes that nodes without ranks have sent; rank 0 calls it.

    Attributes:
        seconds: The sum over windows of the slowest rank's time.
        transmitted: The sum over windows and nodes of the bytes that left a node's interface; None where the
            ranks share a machine without such interfaces.
        traffic: The same from node to node; None where there are no interfaces.
    """

    def __init__(self, beside: Callable[[], int] = lambda: 0) -> None:
        """Find this rank's interface; only the first rank of a node reads it."""
        self._interface = os.environ.get(INTERFACE)
        self._reads = int(os.environ["LOCAL_RANK"]) == 0
        self._nodes = int(os.environ.get(NODES, "1"))
        self._began = (time.perf_counter(), 0)
        self._beside = beside
        self.seconds = 0.0
        self.transmitted: int | None = 0 if self._interface else None
        self.traffic = traffic.here(self._reads) if self._interface else None

    @contextmanager
    def window(self) -> Iterator[None]:
        """Count what happens inside.

        The ranks enter together. Each stops its clock; then they wait for each other, so that all messages
        have arrived before the bytes are read.
        """
        dist.barrier()
        before = self._ask()
        counted = self._counted()
        self._began = (time.perf_counter(), self._read())
        yield
        spent = time.perf_counter() - self._began[0]
        dist.barrier()
        sent = self._read() - self._began[1] + self._ask() - before
        more = self._counted()[1:] - counted[1:]
        everyone = _gather(spent, sent, *counted[:1].tolist(), *more.tolist())
        self.seconds += float(everyone[:, 0].max())
        if self.transmitted is not None:
            self.transmitted += int(everyone[:, 1].sum())
        if self.traffic is not None:
            self.traffic.add(everyone[:, 2:])

    def live(self) -> tuple[float, float | None]:
        """Seconds and megabytes up to now, inside a window, as far as one node can know them."""
        seconds = self.seconds + time.perf_counter() - self._began[0]
        if self.transmitted is None:
            return seconds, None
        return seconds, (self.transmitted + (self._read() - self._began[1]) * self._nodes) / 1e6

    def _ask(self) -> int:
        return self._beside() if self._interface and dist.get_rank() == 0 else 0

    def _counted(self) -> torch.Tensor:
        return torch.empty(0) if self.traffic is None else self.traffic.read()

    def _read(self) -> int:
        return counters.transmitted(self._interface) if self._interface and self._reads else 0


def mean_over_ranks(*values: float) -> tuple[float, ...]:
    """Each value's mean over the ranks; every rank gets the same answer."""
    return tuple(_gather(*values).mean(0).tolist())


def _gather(*values: float) -> torch.Tensor:
    """All ranks' values, of shape (ranks, values), exact for whole numbers below 2**53."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)
