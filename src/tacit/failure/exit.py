"""Closes open sessions when torch.distributed is shut down, or at the end of the program."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

from tacit.transports.process_groups import notify_of_shutdown


class Endable(Protocol):
    """A session at work."""

    def end(self, where: str, error: BaseException | None) -> None:
        """Close the session; if an `error` ends the program, without the other ranks. Never raises."""


_OPEN: list[Endable] = []
_PROCESS: int | None = None
"""The process in which sessions were begun: a forked process inherits this, and ends nothing."""


def watch(ranks: list[int]) -> None:
    """Watch for the shutdown of torch.distributed on these ranks. A collective call of all of them."""
    global _PROCESS
    if _PROCESS is None:
        atexit.register(_at_exit)  # not at import: functions registered later run earlier, before groups end
    _PROCESS = os.getpid()
    notify_of_shutdown(ranks, _at_shutdown)


def began(session: Endable) -> None:
    """Note a session, to end it if the script does not."""
    _OPEN.append(session)


def ended(session: Endable) -> None:
    """Forget a session that was closed."""
    if session in _OPEN:
        _OPEN.remove(session)


def _end_all(where: str, error: BaseException | None) -> None:
    if isinstance(error, SystemExit) and not error.code:
        error = None
    for session in [*_OPEN] if os.getpid() == _PROCESS else []:
        session.end(where, error)


def _at_shutdown() -> None:
    _end_all("destroy_process_group", sys.exc_info()[1])


def _at_exit() -> None:
    # `last_value` is the uncaught error, which Python has just printed.
    _end_all("the end of the program", getattr(sys, "last_value", None))
