"""An exchange in two jobs of a lane, so that others may be sent between its halves."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from tacit.contracts import AllGatherInto, Outcome, Request


class Halves:
    """Runs an exchange up to its first all-gather, and in a second job from there to its end.

    With `Decoupled` the first half is a reduce-scatter. An exchange without an all-gather ends in the first.
    """

    def __init__(self) -> None:
        self._exchange: Generator[Request, Any, Outcome] | None = None
        self._held: Request | None = None
        self._outcome: Outcome | None = None

    @property
    def begun(self) -> bool:
        """Whether the first half has been asked for."""
        return self._exchange is not None

    def next_half(self, open: Callable[[], Generator[Request, Any, Outcome]]) -> Generator[Request, Any, Any]:
        """The next half of the exchange that `open` makes. Returns its outcome, or None after the first."""
        first = self._exchange is None
        if self._exchange is None:
            self._exchange = open()
        answer = None
        if self._held is not None:
            answer = yield self._held
        while self._outcome is None:
            try:
                request = self._exchange.send(answer)
            except StopIteration as end:
                self._outcome = end.value
                break
            if first and isinstance(request, AllGatherInto):
                self._held = request
                return None
            answer = yield request
        return None if first else self._outcome
