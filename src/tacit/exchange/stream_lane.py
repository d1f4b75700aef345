"""Exchanges on a CUDA stream: the host launches them, and waits for nothing but what they read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

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
    collectives can make ranks wait for each other for ever (pytorch#175145). An exchange that needs a value
    on the host asks for it (`Read`), and stops there until all ranks call `settle`, in the same place of that
    order. The first failure ends everything that comes later, with that error.

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
        self._reading: list[tuple[Job, _Copied]] = []
        self.stream = stream_on(device)

    def submit(self, job: Job) -> None:
        """Launch the whole exchange, after what this thread has launched so far."""
        self.submitted, self.submitted_at = self.submitted + 1, time.monotonic()
        if self._failure is None:
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(self._device))
            self._run(job)
        else:
            job.failed(self._failure)

    def settle(self) -> None:
        """Launch the rest of exchanges that wait for numbers of the device: the host waits, once for all.

        If they ask again, it waits again, for all that do.
        """
        while self._reading:
            reading, self._reading = self._reading, []
            if self._failure is None:
                try:
                    reading[-1][1].wait()  # what was copied before is there, too
                except Exception as error:
                    self._failure = self._explain(error)
            for job, numbers in reading:
                if self._failure is None:
                    self._run(job, numbers.found.tolist())
                else:
                    job.fail(self._failure)

    def _run(self, job: Job, answer: list[int] | None = None) -> None:
        """Launch its messages, up to its end, or to where it asks for numbers of the device."""
        with self.inside(), ranges.within(self._name, "exchange"):
            try:
                while job.advance(answer):
                    answer = None
                    if job.read is not None:
                        self._reading.append((job, _Copied(job.read.numbers)))
                        return
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
        """Make this thread's current stream wait for what was submitted to the lane."""
        self.settle()
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)

    @property
    def busy(self) -> bool:
        """Whether the stream has not run all that was launched on it."""
        return self.stream is not None and not self.stream.query()

    def flush(self) -> None:
        """Launch all that was submitted: on the host nothing else is ever under way."""
        self.settle()

    def close(self) -> None:
        """Wait until the stream has run: its memory may be freed then."""
        self.settle()
        if self.stream is not None:
            self.stream.synchronize()


class _Copied:
    """Numbers of a device, on their way to the host.

    Attributes:
        found: they, once the copy is made.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.found, self._made = numbers, None
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.found = host.copy_(numbers, non_blocking=True)
            cuda: Any = torch.cuda
            self._made = cuda.Event()
            self._made.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> None:
        """Wait until the copy is made."""
        if self._made is not None:
            self._made.synchronize()
