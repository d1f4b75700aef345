"""Moments of a training: what a host's clocks say, and a GPU's by events in its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Moment:
    """Readings of the clocks at one time.

    Attributes:
        own: of a thread or a process, in seconds.
        wall: by `time.perf_counter`.
        event: recorded in the GPU's current stream; None: the work is on the host.
    """

    own: float
    wall: float
    event: Any = None

    def until(self, later: Moment) -> float:
        """Seconds until a later moment, waiting included: the GPU's, where there is one."""
        return later.wall - self.wall if self.event is None else self._on_gpu(later)

    def work_until(self, later: Moment) -> float:
        """The same without waiting on a processor."""
        return later.own - self.own if self.event is None else self._on_gpu(later)

    def host_until(self, later: Moment) -> float:
        """Seconds of the host's wall-clock time."""
        return later.wall - self.wall

    def _on_gpu(self, later: Moment) -> float:
        return float(self.event.elapsed_time(later.event)) / 1e3


@dataclass(frozen=True)
class Watch:
    """Reads the clocks.

    Attributes:
        own: the clock of `Moment.own`.
        device: the GPU; None: the work is on the host.
    """

    own: Callable[[], float] = time.process_time
    device: torch.device | None = None

    def now(self) -> Moment:
        """This moment. It waits for nothing."""
        event = None
        if self.device is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
        return Moment(self.own(), time.perf_counter(), event)

    def settled(self) -> Moment:
        """The moment at which the GPU has run what its current stream has got."""
        found = self.now()
        if found.event is None:
            return found
        found.event.synchronize()
        return Moment(self.own(), time.perf_counter(), found.event)

    def took(self, work: Callable[[], object], times: int = 1) -> float:
        """Seconds of some work on the GPU, or of the own clock; the mean of so many times."""
        begun = self.settled()
        for _ in range(times):
            work()
        return begun.work_until(self.settled()) / times
