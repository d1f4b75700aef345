"""What changes of members are: in a round that is under way, and for the user's numbers."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tacit.errors import PayloadError, RoundError, TacitError, first_line
from tacit.levels.level import Level

T = TypeVar("T")
_log = logging.getLogger("tacit")

NO_CHECKPOINT = (
    "a session with members is in no checkpoint: a member takes its state from those that live. Save model "
    "and optimizer, of one member; where all have ended, load them before tacit.attach, on the first to begin"
)


class MembersChange(RoundError):
    """The members of the present period come together for another one."""


def end_under_way(levels: Sequence[Level]) -> None:
    """End what is exchanged in the present period, from which nothing comes any more.

    Raises:
        PayloadError: a hub has put this member out.
    """
    for level in levels:
        if isinstance(level.session.failure.error, PayloadError):
            raise level.session.failure.error
    for level in levels:
        level.session.failure.fail(MembersChange("the members change"))
        level.transport.abort(level.session.failure.error)
        level.session.lanes.flush()


def lost(error: BaseException) -> BaseException:
    """What an error of a collective is among members: one of them is gone, or will be found to be."""
    if isinstance(error, TacitError):
        return error
    found = MembersChange(f"a member is gone: {first_line(error)}")
    found.__cause__ = error
    return found


def begun(call: Callable[[], T], members: int) -> T | None:
    """What a part of a period's beginning returns; None if one of the members is gone meanwhile.

    Raises:
        TacitError: it is another error than that of a round.
    """
    try:
        return call()
    except (RoundError, RuntimeError) as error:
        if isinstance(error, TacitError) and not isinstance(error, RoundError):
            raise
        _log.warning("a period of %d members did not begin: %s", members, first_line(error))
        return None


@dataclass(frozen=True)
class PeriodChange:
    """One change of members, for the user's numbers.

    Attributes:
        period: the number of the new period.
        members: the names of its members.
        seconds: from when this member stopped to when it could go on.
    """

    period: int
    members: tuple[str, ...]
    seconds: float


class Preemption:
    """Whether the machine is to be taken away (SIGTERM), if nobody else handles that signal.

    Attributes:
        noted: whether the signal has come.
    """

    def __init__(self) -> None:
        self.noted = self._listens = False

    def listen(self) -> None:
        """Note the signal from now on; a second one ends the process at once."""
        main = threading.current_thread() is threading.main_thread()
        self._listens = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._listens:
            signal.signal(signal.SIGTERM, self.note)

    def note(self, *_: object) -> None:
        """Note that the signal has come, here or to another rank of this replica."""
        self.noted = True
        self.close()

    def close(self) -> None:
        """Have the signal end the process again."""
        if self._listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
