"""The lanes of a session: one for its buckets, and one for what else is exchanged on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from tacit.contracts import Request, Transport
from tacit.exchange.lane import Job, Lane
from tacit.session.health.failure import SessionFailure
from tacit.transports.devices import ByDevice
from tacit.transports.meter import counted

if TYPE_CHECKING:
    from tacit.exchange.stream_lane import StreamLane

T = TypeVar("T")
Open: TypeAlias = Callable[[], Generator[Request, Any, T]]
"""A function that makes an exchange."""


class Lanes:
    """Makes each lane when it is first needed.

    Args:
        transport: takes the messages.
        device: where buckets are exchanged.
        in_stream: whether they are exchanged in stream order.
        failure: explains an error of a collective, and stores it.
        name: the algorithm's name, for the profiler.

    Attributes:
        posted: how many exchanges this rank has submitted.
        posted_at: when it submitted the last one.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        in_stream: bool,
        failure: SessionFailure,
        name: str,
    ) -> None:
        self._transport, self.device, self._in_stream = transport, device, in_stream
        self._failure, self._name = failure, name
        self._lane: Lane | StreamLane | None = None
        self._stream: StreamLane | None = None
        self._host_lane: Lane | None = None
        self.posted, self.posted_at = 0, time.monotonic()

    @property
    def buckets(self) -> Lane | StreamLane:
        """The lane of the buckets."""
        if self._lane is None and self._in_stream:
            from tacit.exchange.stream_lane import StreamLane

            transport = self._transport
            transport = transport.device if isinstance(transport, ByDevice) else transport
            self._lane = self._stream = StreamLane(
                transport, self._failure.explained, self.device, self._name
            )
        elif self._lane is None:
            self._lane = Lane(self._transport, self._failure.explained, self._name)
        return self._lane

    @property
    def _host(self) -> Lane | StreamLane:
        """The lane for tensors on the host."""
        if not isinstance(self._transport, ByDevice):
            return self.buckets
        if self._host_lane is None:
            self._host_lane = Lane(self._transport.host, self._failure.explained, self._name)
        return self._host_lane

    def submit(self, job: Job, on_host: bool = False) -> None:
        """Put a job at the end of its lane."""
        self.posted, self.posted_at = self.posted + 1, time.monotonic()
        (self._host if on_host else self.buckets).submit(job)

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
        place = self._transport.place

        def fail(error: BaseException) -> None:
            self._failure.lane_failed(error)
            failed()

        return Job(key, lambda: counted(open(), place), lambda found: completed(*found), fail)

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

        for i, (open, key) in enumerate(asked):
            self.submit(self.job(key, open, partial(complete, i), over[i].set), on_host)
        for each in over:
            each.wait()
        self._failure.raise_first()
        return [answers[i] for i in range(len(asked))]

    def inside(self) -> AbstractContextManager[object]:
        """A block whose kernels are launched on the stream of the exchanges, if there is one."""
        return nullcontext() if self._stream is None else self._stream.inside()

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
        for lane in (self._lane, self._host_lane):
            if lane is not None:
                lane.flush()

    def close(self) -> None:
        """Drain and end the lanes."""
        for lane in (self._lane, self._host_lane):
            if lane is not None:
                lane.close()
        self._lane = self._host_lane = None
