"""Ctrl-C and termination as one exception, so that whatever is open is closed on the way out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "interruptible"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the command to end; not an Exception, as nothing but the way out should handle it."""

    def __init__(self, number: int) -> None:
        """Take note of the signal."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number
        """What to exit with, as a shell has it."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at the first signal inside; further ones disturb nothing on the way out.

    They stay ignored after the block too, as what follows an interruption is the end of the command. A signal
    that was ignored from the start stays so: `nohup` has it so, and a shell for its background jobs.
    """
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _raise) for number in heard}
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
