"""Runs exchanges on a transport: one to its end, or a lane of them, answered in order.

`Lane` is for collectives that tell when they are done (Gloo): many exchanges are under way at once.
`StreamLane` is for those that are done when they are launched (NCCL on a CUDA stream): each runs to its end.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tacit import ranges
from tacit.contracts import Collective, Posted, Request, Transport

T = TypeVar("T")


def drive(exchange: Generator[Request, Any, T], transport: Transport, slot: str = "alone") -> T:
    """Run one exchange to its end, and wait for it; nothing else may be under way.

    So all its messages are of stage 0, however many there are.
    """
    return _to_the_end(exchange, transport, slot, None)


def _to_the_end(
    exchange: Generator[Request, Any, T], transport: Transport, slot: str, stages: Counter[str] | None
) -> T:
    """`stages`: counts how often it has spoken on each axis; None: all is of stage 0."""
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the transport"
        stage = 0 if stages is None else stages[request.axis]
        posted, done = transport.post(request, stage, slot), threading.Event()
        if stages is not None:
            stages[request.axis] += 1
        posted.on_done(done.set)
        done.wait()
        answer = posted.answer()


@dataclass(eq=False)
class Job:
    """One exchange in the lane.

    Attributes:
        slot: names it; no other job of that name is under way.
        open: makes the exchange.
        landed: called with its outcome; `failed` with the error.
        light: whether encoding and decoding cost so little that any thread may do it at once.
    """

    slot: str
    open: Callable[[], Generator[Request, Any, Any]]
    completed: Callable[[Any], None]
    failed: Callable[[BaseException], None]
    inline: bool = False
    exchange: Generator[Request, Any, Any] | None = None
    request: Collective | None = None
    posted: Posted | None = None
    stages: Counter[str] = field(default_factory=Counter)
    ended: bool = False


class Lane:
    """Runs exchanges: it starts them in the order they came, and resumes each when its answer is there.

    Many are under way at once, so that no link idles while another exchange is on another link or computes.
    But the messages of one stage on one axis leave in the order of the exchanges: a request that comes early
    is held until all earlier exchanges have posted theirs, or have ended. So all ranks post in one order, and
    as the earliest exchange never waits for a later one, no two ranks can wait for each other. The first
    failure ends everything that is under way, and everything that comes later, with that error.

    The work is done by a thread of the lane's own, but for light jobs: those are started by the thread that
    submits them and resumed by the one that brings the answer, as on busy cores each change of threads costs
    a turn of the scheduler. One thread at a time touches the jobs; whoever comes meanwhile leaves its event.

    Args:
        transport: takes the messages.
        explain: turns a failure into the error that is given to the jobs.
        name: the algorithm's, for the profiler.
    """

    def __init__(
        self, transport: Transport, explain: Callable[[BaseException], BaseException], name: str = ""
    ) -> None:
        self._transport = transport
        self._name = name
        self._explain = explain
        self._events: SimpleQueue[Job] = SimpleQueue()
        self._turn = threading.Lock()
        self._under_way: deque[Job] = deque()
        self._failure: BaseException | None = None
        self._open = 0
        self._idle = threading.Condition()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tacit-lane", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the lane."""
        with self._idle:
            self._open += 1
        self._happened(job)

    def flush(self) -> None:
        """Wait until the lane is empty."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)

    def close(self) -> None:
        """Drain the lane and end its thread."""
        if self._thread.is_alive():
            self.flush()
            self._calls.put(False)
            self._thread.join()

    def _run(self) -> None:
        while self._calls.get():
            self._take_events()

    def _happened(self, job: Job) -> None:
        self._events.put(job)
        if job.inline:
            self._take_events()
        else:
            self._calls.put(True)

    def _take_events(self) -> None:
        while not self._events.empty():  # again after the release: an event may have come just before it
            if not self._turn.acquire(blocking=False):
                return
            try:
                while not self._events.empty():
                    self._handle(self._events.get())
            finally:
                self._turn.release()

    def _handle(self, job: Job) -> None:
        if self._failure is not None:
            self._end(job, self._failure)
            return
        self._attempt(self._start if job.posted is None else self._resume, job)
        for held in [each for each in self._under_way if each.request is not None]:
            if self._failure is None:
                self._attempt(self._post_in_turn, held)

    def _attempt(self, step: Callable[[Job], None], job: Job) -> None:
        try:
            step(job)
        except BaseException as error:
            self._failure = self._explain(error)
            pending = [*self._under_way] if job in self._under_way else [*self._under_way, job]
            self._under_way.clear()
            for each in pending:
                self._end(each, self._failure)

    def _start(self, job: Job) -> None:
        with ranges.within(self._name, "start"):
            job.exchange = job.open()
            self._under_way.append(job)
            self._advance(job, None)

    def _resume(self, job: Job) -> None:
        posted, job.posted = job.posted, None
        assert posted is not None
        with ranges.within(self._name, "resume"):
            self._advance(job, posted.answer())

    def _advance(self, job: Job, answer: Any) -> None:
        assert job.exchange is not None
        try:
            request = job.exchange.send(answer)
        except StopIteration as end:
            job.completed(end.value)
            job.ended = True
            self._under_way.remove(job)
            self._done()
            return
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the lane"
        job.request = request

    def _post_in_turn(self, job: Job) -> None:
        request = job.request
        assert request is not None
        stage = job.stages[request.axis]
        for earlier in self._under_way:
            if earlier is job:
                break
            if earlier.stages[request.axis] <= stage:
                return
        job.request = None
        job.stages[request.axis] += 1
        with ranges.within(self._name, f"post_{type(request).__name__.lower()}_{request.axis}"):
            job.posted = self._transport.post(request, stage, job.slot)
        job.posted.on_done(lambda: self._happened(job))

    def _end(self, job: Job, error: BaseException) -> None:
        if job.ended:  # it failed earlier, and this is the event of its last answer
            return
        job.ended = True
        if job.exchange is not None:
            job.exchange.close()
        job.failed(error)
        self._done()

    def _done(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()


class StreamLane:
    """Runs each exchange to its end in the thread that submits it, on a CUDA stream of the lane's own.

    Nothing is waited for: the stream waits for what the submitting thread has launched so far, all of the
    exchange is launched on it, and whoever uses an answer has its stream wait for this one (`join`). So there
    is one order of launches, that of the calls, on every rank; a second thread that launches collectives can
    make ranks wait for each other for ever (pytorch#175145). An exchange must therefore never need a value on
    the host. The first failure ends everything that comes later, with that error.

    Args:
        transport: takes the messages; its collectives count as done when they are launched.
        explain: turns a failure into the error that is given to the jobs.
        device: whose stream; on the CPU there is none, and all is done at once.
        name: the algorithm's, for the profiler.
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
        self._failure: BaseException | None = None
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, job: Job) -> None:
        """Launch all of it, behind what this thread has launched so far."""
        if self._failure is None:
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(self._device))
            with self.inside(), ranges.within(self._name, "exchange"):
                try:
                    job.completed(_to_the_end(job.open(), self._transport, job.slot, Counter()))
                    return
                except Exception as error:
                    self._failure = self._explain(error)
        job.failed(self._failure)

    def inside(self) -> AbstractContextManager[object]:
        """What is launched inside the block goes to the lane's stream."""
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """What this thread launches from now on waits for what the lane has launched."""
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def flush(self) -> None:
        """Nothing is ever under way on the host."""

    def close(self) -> None:
        """Wait until the stream has run: its memory may be freed then."""
        if self.stream is not None:
            self.stream.synchronize()
