"""What a worker prints for the command that started it: marked lines of JSON, among other output.

They hold progress messages (`Progress`), signs of members (`MemberSign`), records and timelines. The command
writes records into files, so that a full disk does not stop the ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from tacit.errors import ConfigError
from tacit.timelines import Timeline
from tacit_lab.records import Line, Record, parse_also

_RECORD = "@tacit-record "


@dataclass(frozen=True, kw_only=True)
class MarkedLine:
    """What travels as a marked line of JSON.

    Attributes:
        mark: how such a line begins; each class has its own.
    """

    mark: ClassVar[str]

    def to_line(self) -> str:
        """This message as a line that `from_line` can parse."""
        return self.mark + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """The message in a line of output; None if the line has none, or only a part of one."""
        _, mark, text = line.partition(cls.mark)
        try:
            return cls(**json.loads(text)) if mark else None
        except (json.JSONDecodeError, TypeError):
            return None  # the output of two ranks may be mixed in one line, and a lost message does no harm


@dataclass(frozen=True, kw_only=True)
class Progress(MarkedLine):
    """How far a training is. Counts are from its start."""

    mark = "@tacit-progress "

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


@dataclass(frozen=True, kw_only=True)
class MemberSign(MarkedLine):
    """What a member says of its training, a few times a second and when members change.

    Attributes:
        node: where it is; `process`: its number there, another one when it was started again.
        at: seconds since 1970.
        steps: of the whole run; `step`: how many of them are taken.
        round: how many rounds are finished; `period`: of how many `members`.
        samples: how many this process has trained on; `useful`: of these, whose round is finished, without
            those whose steps the state of others has replaced.
        sent: bytes that the node's interface has sent since it was made; None without one.
        loss: of the last batch; at the end on held-out data.
        accuracy: on held-out data, at the end; None before.
        metrics: the session's numbers, at the end.
    """

    mark = "@tacit-member "

    node: int
    process: int
    at: float
    parameters: int
    steps: int
    step: int = 0
    round: int = 0
    period: int = 0
    members: int = 0
    samples: int = 0
    useful: int = 0
    sent: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


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
