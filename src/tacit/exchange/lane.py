"""Many exchanges under way at once, answered in order.

`Lane` is for collectives that report when they are done (Gloo). `stream_lane.StreamLane` is for those that
are done when they are launched (NCCL on a CUDA stream).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from tacit import ranges
from tacit.contracts import Collective, Posted, Read, Request, Transport, stage_of
from tacit.torch_compat import is_profiling


@dataclass(eq=False)
class Job:
    """One exchange in the lane.

    Attributes:
        key: its name; no other job of that name is under way.
        open: makes the exchange.
        completed: called with what the exchange returns, and the bytes that this rank has sent in it.
        failed: called with the error.
        inline: whether encoding and decoding cost so little that any thread may do it at once.
        request: the request that the exchange waits for, until it is posted.
        read: numbers of a device that it waits for; `advance` then gets them.
        posted: the posted request.
        sent: bytes that this rank has sent, by formulas.
    """

    key: str
    open: Callable[[], Generator[Request, Any, Any]]
    completed: Callable[[Any, int], None]
    failed: Callable[[BaseException], None]
    inline: bool = False
    exchange: Generator[Request, Any, Any] | None = None
    request: Collective | None = None
    read: Read | None = None
    posted: Posted | None = None
    stages: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    ended: bool = False

    def run_inline(self) -> None:
        """Have it run by whichever thread submits it or brings an answer."""
        self.inline = True

    def advance(self, answer: list[int] | None = None) -> bool:
        """Begin it, or go on with the answer to what was posted, up to the next request; False at the end.

        `answer`: that to `read`.
        """
        if self.exchange is None:
            self.exchange = self.open()
        posted, self.posted, self.read = self.posted, None, None
        answer = answer if posted is None else posted.answer()
        try:
            request = self.exchange.send(answer)
        except StopIteration as end:
            self.completed(end.value, self.sent)
            self.ended = True
            return False
        if isinstance(request, Read):
            self.read = request
            return True
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the lane"
        self.request = request
        return True

    def post(self, transport: Transport, where: str) -> Posted:
        """Post the request as the next stage of `where`; see `stage_of`."""
        request, self.request = self.request, None
        assert request is not None
        stage = self.stages[where]
        self.stages[where] += 1
        posted = self.posted = transport.post(request, stage, self.key)
        self.sent += posted.sent
        return posted

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error."""
        self.ended = True
        if self.exchange is not None:
            self.exchange.close()
        self.failed(error)


class Staged(Protocol):
    """An exchange under way.

    Attributes:
        stages: how many requests it has posted on each axis, by `stage_of`.
    """

    stages: Counter[str]


def in_turn(job: Staged, where: str, under_way: Iterable[Staged]) -> bool:
    """Whether an exchange may post to `where` (see `stage_of`): all earlier ones have posted theirs."""
    for earlier in under_way:
        if earlier is job:
            break
        if earlier.stages[where] <= job.stages[where]:
            return False
    return True


class Lane:
    """Runs exchanges: it starts them in the order they came, and resumes each when its answer is there.

    Many are under way at once, so that no link idles while another exchange is on another link or computes.
    But the messages of one stage on one axis leave in the order of the exchanges: a request that comes early
    is held until all earlier exchanges have posted theirs, or have ended. So all ranks post in one order, and
    as the earliest exchange never waits for a later one, no two ranks can wait for each other. The first
    failure ends everything that is under way, and everything that comes later, with that error.

    A thread of the lane does the work, except for inline jobs: those are started by the thread that submits
    them and resumed by the one that brings the answer, as on busy cores each change of threads costs a turn
    of the scheduler. One thread at a time works on the jobs; others queue their events.

    Args:
        transport: takes the messages.
        explain: turns a failure into the error that the jobs get.
        name: the algorithm's name, for the profiler.

    Attributes:
        submitted: the number of its jobs.
        submitted_at: when the last one was submitted.
    """

    def __init__(
        self, transport: Transport, explain: Callable[[BaseException], BaseException], name: str = ""
    ) -> None:
        self._transport = transport
        self._name = name
        self._explain = explain
        self.submitted, self.submitted_at = 0, time.monotonic()
        self._events: SimpleQueue[Job] = SimpleQueue()
        self._turn = threading.Lock()
        self._under_way: deque[Job] = deque()
        self._failure: BaseException | None = None
        self._open = 0
        self._idle = threading.Condition()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Put a job at the end of the lane."""
        with self._idle:
            self._open += 1
            self.submitted, self.submitted_at = self.submitted + 1, time.monotonic()
            if self._thread is None and not job.inline:
                thread = threading.Thread(target=self._run, name="tacit-lane", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # at the end of the program Python 3.12 starts no thread any more
                    job.run_inline()
        self._happened(job)

    def flush(self) -> None:
        """Wait until the lane is empty."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)

    def close(self) -> None:
        """Drain the lane and end its thread."""
        if self._thread is not None and self._thread.is_alive():
            self.flush()
            self._calls.put(False)
            self._thread.join()
            self._thread = None

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
        self._attempt(self._advance, job, "start" if job.exchange is None else "resume")
        for held in tuple(self._under_way):
            if held.request is not None and self._failure is None:
                self._attempt(self._post_in_turn, held)

    def _attempt(self, step: Callable[[Job], None], job: Job, phase: str = "") -> None:
        """Take the step; `phase`: of the exchange, for the profiler."""
        try:
            if phase and is_profiling():
                with ranges.within(self._name, phase):
                    step(job)
            else:
                step(job)
        except BaseException as error:
            self._failure = self._explain(error)
            pending = [*self._under_way] if job in self._under_way else [*self._under_way, job]
            self._under_way.clear()
            for each in pending:
                self._end(each, self._failure)

    def _advance(self, job: Job) -> None:
        if job.exchange is None:
            self._under_way.append(job)
        more = job.advance()
        while job.read is not None:  # only in emulation, where tensors of the host count as a device's, too
            more = job.advance(job.read.numbers.tolist())
        if not more:
            self._under_way.remove(job)
            self._done()

    def _post_in_turn(self, job: Job) -> None:
        request = job.request
        assert request is not None
        where = stage_of(request)
        if job is not self._under_way[0] and not in_turn(job, where, self._under_way):
            return
        if is_profiling():
            with ranges.within(self._name, f"post_{type(request).__name__.lower()}_{request.axis}"):
                posted = job.post(self._transport, where)
        else:
            posted = job.post(self._transport, where)
        posted.on_done(partial(self._happened, job))

    def _end(self, job: Job, error: BaseException) -> None:
        if not job.ended:  # else it failed earlier, and this is the event of its last answer
            job.fail(error)
            self._done()

    def _done(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()
