"""Finds out which rank of a run failed first: from what each rank's keeper reports, and from torchrun."""

from __future__ import annotations

import json
import re
import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tacit.testbed.results import Failure

_LOST_PEER = re.compile(r"onnection (closed|reset) by peer|Broken pipe|got 0 bytes|\bPeerLost\b")
_SUMMARY = "Root Cause (first observed failure)"
_SUMMARY_ENTRY = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")


@dataclass(frozen=True)
class Report:
    """How a rank ended, and when it began to."""

    rank: int
    code: int
    time: float
    traceback: str | None = None

    @property
    def lost(self) -> bool:
        """Whether it fell with another: it says that it lost a peer, or the launcher ended it."""
        return self.code == -signal.SIGTERM or bool(self.traceback and _LOST_PEER.search(self.traceback))

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts the cause before its consequences.

        A rank that exits closes its connections a good while before it is gone, so its peers may complain
        first; and a launcher sends SIGTERM to its other ranks when one has failed.
        """
        return self.lost, self.time


@dataclass
class Node:
    """What is known of one node during a run.

    Attributes:
        number: Which node.
        code: How its launcher ended; None while it runs.
        ended: When.
        stopped: Whether we ended it, because another node failed or the time was up.
        last_lines: What its launcher and ranks printed last on stderr.
    """

    number: int
    code: int | None = None
    ended: float = 0.0
    stopped: bool = False
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    _reports: dict[int, Report] = field(default_factory=dict)
    _tracebacks: dict[int, str] = field(default_factory=dict)

    def hear(self, text: str) -> None:
        """Take in a piece of a report; what ranks do after we stopped them is no failure."""
        message = json.loads(text)
        rank = message["rank"]
        if "traceback" in message:
            self._tracebacks[rank] = self._tracebacks.get(rank, "") + message["traceback"]
        elif not self.stopped:
            self._reports[rank] = Report(rank, message["code"], message["time"], self._tracebacks.get(rank))

    @property
    def failed(self) -> bool:
        """Whether the node failed by itself."""
        return bool(self.code) and (not self.stopped or bool(self._reports))

    @property
    def cause(self) -> Report | None:
        """The rank that failed first; None when the launcher failed without any."""
        first = min(self._reports.values(), key=lambda report: report.order, default=None)
        if first and not first.lost:
            return first
        # Perhaps the keeper of the rank was killed with it; torchrun knows then, though not why.
        seen = _summarized(self.last_lines, self.ended)
        return first if seen is None or seen.rank in self._reports else seen

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts the node that failed first before the others."""
        return self.cause.order if self.cause else (False, self.ended)

    def failure(self) -> Failure:
        """How it failed."""
        if (cause := self.cause) is not None:
            return Failure(self.number, cause.rank, reason(cause.code), cause.traceback, cause.code)
        return Failure(
            self.number, None, reason(self.code or 0), "\n".join(self.last_lines) or None, self.code
        )


def reason(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _summarized(lines: Iterable[str], ended: float) -> Report | None:
    """What torchrun says at its end of the first failure that it saw."""
    _, title, summary = "\n".join(lines).rpartition(_SUMMARY)
    found = _SUMMARY_ENTRY.search(summary) if title else None
    return Report(int(found[1]), int(found[2]), ended) if found else None
