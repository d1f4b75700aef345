"""The lanes of a session: one for its buckets, and one for what else is exchanged on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from tacit.contracts import Request, Transport
from tacit.exchange.lane import Job, Lane
from tacit.session.health.failure import SessionFailure
from tacit.transports.by_device import ByDevice

if TYPE_CHECKING:
    from tacit.exchange.stream_lane import StreamLane

T = TypeVar("T")
Open: TypeAlias = Callable[[], Generator[Request, Any, T]]
"""A function that makes an exchange."""


class Lanes:
    """The lane of the buckets, and that of what lies on the host, which may be the same.

    Args:
        transport: takes the messages.
        device: where buckets are exchanged.
        in_stream: whether they are exchanged in stream order.
        failure: explains an error of a collective, and stores it.
        name: the algorithm's name, for the profiler.

    Attributes:
        buckets: the lane of the buckets.
        inside: makes a block whose kernels are launched on the stream of the exchanges, if there is one.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        in_stream: bool,
        failure: SessionFailure,
        name: str,
    ) -> None:
        self.device, self._failure = device, failure
        self._stream: StreamLane | None = None
        if in_stream:
            from tacit.exchange.stream_lane import StreamLane

            on_device = transport.device if isinstance(transport, ByDevice) else transport
            self._stream = StreamLane(on_device, failure.explained, device, name)
        self.buckets = self._stream or Lane(transport, failure.explained, name)
        self._host = self.buckets
        if isinstance(transport, ByDevice):
            self._host = Lane(transport.host, failure.explained, name)
        self.inside = nullcontext if self._stream is None else self._stream.inside

    @property
    def posted(self) -> int:
        """How many exchanges this rank has submitted."""
        return sum(lane.submitted for lane in {self.buckets, self._host})

    @property
    def posted_at(self) -> float:
        """When it submitted the last one."""
        return max(lane.submitted_at for lane in (self.buckets, self._host))

    def submit_on_host(self, job: Job) -> None:
        """Put a job for tensors on the host at the end of its lane."""
        self._host.submit(job)

    def job(
        self,
        key: str,
        open: Open[T],
        completed: Callable[[T, int], None],
        failed: Callable[[], None],
    ) -> Job:
        """A job that exchanges something else than a bucket.

        `completed` is called in the lane with the answer and the number of bytes sent; `failed`, after a
        failure.
        """

        def fail(error: BaseException) -> None:
            self._failure.lane_failed(error)
            failed()

        return Job(key, open, completed, fail)

    def ask(
        self, asked: Sequence[tuple[Open[T], str]], sent: Callable[[int], None], on_host: bool = False
    ) -> list[T]:
        """Run exchanges of something else than buckets at the same time, after all that was submitted.

        `sent` is called with the bytes of each.

        Raises:
            RoundError: one failed, or an earlier exchange did.
        """
        answers: dict[int, T] = {}
        over = [threading.Event() for _ in asked]

        def complete(i: int, answer: T, bytes_out: int) -> None:
            sent(bytes_out)
            answers[i] = answer
            over[i].set()

        lane = self._host if on_host else self.buckets
        for i, (open, key) in enumerate(asked):
            lane.submit(self.job(key, open, partial(complete, i), over[i].set))
        self.settle()
        for each in over:
            each.wait()
        self._failure.raise_first()
        return [answers[i] for i in range(len(asked))]

    def settle(self) -> None:
        """In stream order: launch the rest of exchanges that wait for numbers of the device."""
        if self._stream is not None:
            self._stream.settle()

    def join(self) -> None:
        """Make this thread's current stream wait for that of the exchanges, if there is one."""
        if self._stream is not None:
            self._stream.join()

    def overdue(self, seconds: float) -> bool:
        """Whether a device has not finished all exchanges `seconds` after the last one was submitted.

        It need not mean that a peer is gone: a collective on a device has no time-out that raises. The stream
        is queried only after that time, as a query would end a CUDA graph's capture in another thread.
        """
        lane = self._stream
        return lane is not None and time.monotonic() - self.posted_at > seconds and lane.busy

    def flush(self) -> None:
        """Wait until nothing is under way."""
        self.buckets.flush()
        self._host.flush()

    def close(self) -> None:
        """Drain and end the lanes."""
        self.buckets.close()
        self._host.close()
