"""Collectives of torch.distributed that were posted, and their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class Now:
    """An answer that is there at once."""

    value: Any
    sent: int = 0

    def on_done(self, call: Callable[[], None]) -> None:
        """See `contracts.Posted`."""
        call()

    def answer(self) -> Any:
        """See `contracts.Posted`."""
        return self.value


@dataclass(eq=False)
class Later:
    """Collectives under way, until they are done or abandoned."""

    futures: Sequence[torch.futures.Future[Any]]
    read: Callable[[], Any]
    done: Callable[[Later], None]
    sent: int = 0
    error: BaseException | None = None
    call: Callable[[], None] | None = None

    def on_done(self, call: Callable[[], None]) -> None:
        """See `contracts.Posted`."""
        once = _Once(call)
        self.call = once
        if self.error is not None:
            once()
        elif len(self.futures) == 1:
            self.futures[0].add_done_callback(lambda _: once())
        else:
            _when_all(self.futures, once)

    def give_up(self, error: BaseException) -> None:
        """Answer with this error now: Gloo ends a hanging collective no earlier than its time-out."""
        self.error = error
        if self.call is not None:
            self.call()

    def hangs(self) -> bool:
        """Whether the backend has not ended it, even if `give_up` has answered it."""
        return not all(future.done() for future in self.futures)

    def answer(self) -> Any:
        """See `contracts.Posted`; raises the error of `give_up`, or the backend's."""
        if self.error is not None:
            raise self.error
        for future in self.futures:
            future.value()  # raises the backend's error
        self.done(self)
        return self.read()


class _Once:
    """A call that is made only once, by the first of several callers."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._first = call, threading.Lock()

    def __call__(self) -> None:
        if self._first.acquire(blocking=False):
            self._call()


def _when_all(futures: Sequence[torch.futures.Future[Any]], call: Callable[[], None]) -> None:
    """Call once all futures are done; `collect_all` is done at the first failure, when others still write."""
    if not futures:
        call()
        return
    missing, lock = [len(futures)], threading.Lock()

    def one(_: object) -> None:
        with lock:
            missing[0] -= 1
            last = missing[0] == 0
        if last:
            call()

    for future in futures:
        future.add_done_callback(one)
