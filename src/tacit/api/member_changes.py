"""What changes of members are: in a round that is under way, and for the user's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tacit.errors import RoundError, TacitError, first_line


class MembersChange(RoundError):
    """The members of the present period come together for another one."""


def lost(error: BaseException) -> BaseException:
    """What an error of a collective is among members: one of them is gone, or will be found to be."""
    if isinstance(error, TacitError):
        return error
    found = MembersChange(f"a member is gone: {first_line(error)}")
    found.__cause__ = error
    return found


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
