"""Runs one exchange to its end on a transport."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from typing import Any, TypeVar

from tacit.contracts import Collective, Request, Transport, stage_of

T = TypeVar("T")


def drive(
    exchange: Generator[Request, Any, T],
    transport: Transport,
    key: str = "alone",
    stages: Counter[str] | None = None,
) -> T:
    """Run an exchange to its end in this thread, and wait for each answer.

    Args:
        exchange: yields requests, and is sent their answers.
        transport: takes its messages.
        key: names it among the exchanges of its stage.
        stages: counts its collectives on each axis, which are its stages. None: nothing else is under way,
            and all its messages are of stage 0, however many there are.

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
        stage = 0 if stages is None else stages[stage_of(request)]
        posted, done = transport.post(request, stage, key), threading.Event()
        if stages is not None:
            stages[stage_of(request)] += 1
        posted.on_done(done.set)
        done.wait()
        answer = posted.answer()
