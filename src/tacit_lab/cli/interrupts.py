"""SIGINT, SIGTERM and SIGHUP raise one exception, so that everything is closed as it propagates."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the command to end. It is no Exception, so that `except Exception` lets it pass."""

    def __init__(self, number: int) -> None:
        """Of the signal with this number."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number
        """The exit code, which is 128 + the number, as in a shell."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at the first signal in the block, and ignore all further signals.

    So the block can clean up. They are still ignored after the block, as the command ends then. A signal that
    was ignored from the start stays ignored: `nohup` does that, and a shell does it for background jobs.
    """
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _raise) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _raise:
                signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)
