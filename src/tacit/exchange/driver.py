"""Runs one exchange to its end on a transport."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, TypeVar

from tacit.contracts import Collective, Request, Transport

T = TypeVar("T")


def drive(
    exchange: Generator[Request, Any, T],
    transport: Transport,
    key: str = "alone",
) -> T:
    """Run an exchange to its end in this thread, and wait for each answer; nothing else is under way.

    All its messages are of stage 0, however many there are.

    Args:
        exchange: yields requests, and is sent their answers.
        transport: takes its messages.
        key: names it among the exchanges of its stage.

    Returns:
        What the exchange returns.
    """
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        assert isinstance(request, Collective), f"a {type(request).__name__} reached the transport"
        done = threading.Event()
        posted = transport.post(request, 0, key)
        posted.on_done(done.set)
        done.wait()
        answer = posted.answer()
