"""Exchanges on a CUDA stream: each is launched as a whole, and the host waits for none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tacit import ranges
from tacit.contracts import Transport, stage_of
from tacit.exchange.lane import Job


def stream_on(device: torch.device) -> Any:
    """A stream beside the one that trains; None on devices that have none."""
    cuda: Any = torch.cuda
    return cuda.Stream(device) if device.type == "cuda" else None


class StreamLane:
    """Runs each exchange to its end in the thread that submits it, on a separate CUDA stream.

    The host waits for nothing: the stream waits for what the submitting thread has launched so far, the whole
    exchange is launched on it, and a thread that uses an answer makes its stream wait for this one (`join`).
    So there is one order of launches, that of the calls, on every rank; a second thread that launches
    collectives can make ranks wait for each other for ever (pytorch#175145). An exchange must therefore never
    need a value on the host. The first failure ends everything that comes later, with that error.

    Args:
        transport: takes the messages; its collectives count as done when they are launched.
        explain: turns a failure into the error that the jobs get.
        device: the stream's device; on the CPU there is no stream, and all is done at once.
        name: the algorithm's name, for the profiler.

    Attributes:
        submitted: the number of its jobs.
        submitted_at: when the last one was submitted.
    """

    def __init__(
        self,
        transport: Transport,
        explain: Callable[[BaseException], BaseException],
        device: torch.device,
        name: str = "",
    ) -> None:
        self._transport, self._explain, self._name = transport, explain, name
        self._device = device
        self.submitted, self.submitted_at = 0, time.monotonic()
        self._failure: BaseException | None = None
        self.stream = stream_on(device)

    def submit(self, job: Job) -> None:
        """Launch the whole exchange, after what this thread has launched so far."""
        self.submitted, self.submitted_at = self.submitted + 1, time.monotonic()
        if self._failure is None:
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(self._device))
            with self.inside(), ranges.within(self._name, "exchange"):
                try:
                    while job.advance():
                        assert job.request is not None
                        done = threading.Lock()  # in the hot path: an Event takes ten times as long
                        done.acquire()
                        job.post(self._transport, stage_of(job.request)).on_done(done.release)
                        done.acquire()  # a device's is at once; replicas of one process wait for each other
                    return
                except Exception as error:
                    self._failure = self._explain(error)
        job.failed(self._failure)

    def inside(self) -> AbstractContextManager[object]:
        """A block whose kernels are launched on the lane's stream."""
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """Make this thread's current stream wait for what the lane has launched."""
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)

    @property
    def busy(self) -> bool:
        """Whether the stream has not run all that was launched on it."""
        return self.stream is not None and not self.stream.query()

    def flush(self) -> None:
        """Return at once: on the host nothing is ever under way."""

    def close(self) -> None:
        """Wait until the stream has run: its memory may be freed then."""
        if self.stream is not None:
            self.stream.synchronize()
