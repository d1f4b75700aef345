"""What a worker prints for the command that started it: marked lines of JSON, among other output.

They hold progress messages (`Progress`), records and timelines. The command writes records into files, so
that a full disk does not stop the ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from tacit.errors import ConfigError
from tacit.timelines import Timeline
from tacit_lab.records import Line, Record, parse_also

_MARK = "@tacit-progress "
_RECORD = "@tacit-record "


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is. Counts are from its start."""

    algorithm: str
    epoch: int
    """Epochs that have ended."""
    step: int
    steps: int | None
    """Steps in the whole run; None where that is not known."""
    seconds: float
    loss: float | None
    """Of rank 0's last batch, or on held-out data once an epoch has ended; of a script what it reports."""
    accuracy: float | None
    """On held-out data, after the last epoch that ended; None before that."""
    mb: float | None
    """Megabytes between nodes: exact at an epoch's end, and within it extrapolated from the first node."""

    def to_line(self) -> str:
        """This message as a line that `from_line` can parse."""
        return _MARK + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """The message in a line of output; None if the line has none, or only a part of one."""
        _, mark, text = line.partition(_MARK)
        try:
            return cls(**json.loads(text)) if mark else None
        except (json.JSONDecodeError, TypeError):
            return None  # the output of two ranks may be mixed in one line, and a lost message does no harm


def line_of(record: Line) -> str:
    """A record or a timeline as a line that `record_in` can parse."""
    return _RECORD + record.to_json()


def record_in(line: str) -> Record | Timeline | None:
    """The record or the timeline in a line of output; None if the line has none, or only a part of one."""
    _, mark, text = line.partition(_RECORD)
    if not mark:
        return None
    try:
        return parse_also(text, Timeline)
    except ConfigError:
        return None
