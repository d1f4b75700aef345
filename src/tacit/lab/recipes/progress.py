"""What a worker tells the command that started it: marked lines of JSON among whatever else it prints.

How far it is (`Progress`), and its records and timelines: the command writes these down, so that a disk that
takes nothing more is no matter of the ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from tacit.errors import ConfigError
from tacit.lab.records import Line, Record, parse_also
from tacit.timelines import Timeline

__all__ = ["Progress", "line_of", "record_in"]

_MARK = "@tacit-progress "
_RECORD = "@tacit-record "


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come; counts are from its start."""

    algorithm: str
    epoch: int
    """Epochs that have ended."""
    step: int
    steps: int
    """Steps in the whole run."""
    seconds: float
    loss: float
    """Of rank 0's last batch, or held out once an epoch has ended."""
    accuracy: float | None
    """Held out, after the last epoch that ended; None before that."""
    mb: float | None
    """Megabytes between nodes: exact at an epoch's end, within it extrapolated from the first node."""

    def to_line(self) -> str:
        """This message as a line that `from_line` knows again."""
        return _MARK + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """The message in a line of output; None where the line holds none, or only part of one."""
        _, mark, text = line.partition(_MARK)
        try:
            return cls(**json.loads(text)) if mark else None
        except (json.JSONDecodeError, TypeError):
            return None  # two ranks' output may run into one line, and a message is never worth a crash


def line_of(record: Line) -> str:
    """A record or a timeline as a line that `record_in` knows again."""
    return _RECORD + record.to_json()


def record_in(line: str) -> Record | Timeline | None:
    """The record or the timeline in a line of output; None where the line holds none, or only part of one."""
    _, mark, text = line.partition(_RECORD)
    if not mark:
        return None
    try:
        return parse_also(text, Timeline)
    except ConfigError:
        return None
