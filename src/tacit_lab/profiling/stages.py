"""Exact processor time by thread and stage: what a thread does between two readings belongs to one stage."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

UNATTRIBUTED = "not attributed"
"""What a thread does outside of all stages."""
_TRIES = 5


@dataclass(eq=False)
class ThreadStages:
    """The stages of one thread, each without those inside it.

    Attributes:
        nested: Where it is now, outermost first.
        last: The thread's processor time at the last change, in ns.
        totals: Up to then, by stage, in ns. Their sum is `last`.
        changes: How many there were.
    """

    nested: list[str] = field(default_factory=list)
    last: int = 0
    totals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    changes: int = 0

    @property
    def now(self) -> str:
        """The innermost stage."""
        return self.nested[-1] if self.nested else UNATTRIBUTED

    def until(self, cpu: int) -> None:
        """The thread's processor time is `cpu` now; what came since the last change was spent in `now`."""
        self.totals[self.now] += cpu - self.last
        self.last = cpu
        self.changes += 1

    def at(self, cpu: int) -> dict[str, int]:
        """The totals as they would be if it changed now; their sum is `cpu`."""
        found = dict(self.totals)
        found[self.now] = found.get(self.now, 0) + cpu - self.last
        return found


class StageClock:
    """Takes the processor time of stages, in all threads that enter one.

    Args:
        cpu: Reads the processor time of the calling thread, in ns.
    """

    def __init__(self, cpu: Callable[[], int] = time.thread_time_ns) -> None:
        self._cpu = cpu
        # By the system's number: a thread that C++ made has new thread-locals in each call into Python.
        self.threads: dict[int, ThreadStages] = {}

    def enter(self, stage: str) -> None:
        """This thread is in this stage from now on, inside the one where it was."""
        here = self.threads.setdefault(threading.get_native_id(), ThreadStages())
        here.until(self._cpu())
        here.nested.append(stage)

    def leave(self) -> None:
        """This thread is back where it was before the last `enter`."""
        here = self.threads[threading.get_native_id()]
        here.until(self._cpu())
        here.nested.pop()

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """This thread is in this stage inside the block."""
        self.enter(stage)
        try:
            yield
        finally:
            self.leave()

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """The function, whose time belongs to this stage."""

        @functools.wraps(function)
        def in_stage(*args: Any, **kwargs: Any) -> Any:
            self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return in_stage

    def stepwise(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """The same of a function that makes a generator: the time of each of its steps counts."""

        @functools.wraps(function)
        def in_steps(*args: Any, **kwargs: Any) -> Any:
            with self.within(stage):
                generator = function(*args, **kwargs)
            return self._steps(generator, stage)

        return in_steps

    def _steps(self, generator: Generator[Any, Any, Any], stage: str) -> Generator[Any, Any, Any]:
        answer: Any = None
        try:
            while True:
                with self.within(stage):
                    request = generator.send(answer)
                answer = yield request
        except StopIteration as end:
            return end.value
        finally:
            generator.close()

    def of(self, tid: int, cpu: Callable[[int], int]) -> dict[str, int]:
        """Processor time by stage of a thread, running ones included, in ns; `cpu` reads a thread's clock.

        Raises:
            OSError: There is no such thread any more.
        """
        thread = self.threads.get(tid)
        for _ in range(_TRIES if thread else 0):
            assert thread is not None
            before = thread.last
            found = thread.at(cpu(tid))
            if thread.last == before:
                return found
        return {UNATTRIBUTED: cpu(tid)} if thread is None else thread.at(max(cpu(tid), thread.last))


def cpu_ns(tid: int) -> int:
    """The processor time of any thread of this process, in ns.

    Raises:
        OSError: There is no such thread.
    """
    # The clock that `pthread_getcpuclockid` gives, by the system's number instead of a pthread's.
    return time.clock_gettime_ns(~tid << 3 | 6)
