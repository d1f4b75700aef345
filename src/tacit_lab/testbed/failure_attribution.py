"""Finds out which rank of a run failed first, from the reports of rank.py and from torchrun's output."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tacit_lab.testbed.results import Ending, Failure

_LOST_PEER = re.compile(
    r"onnection (closed|reset) by peer|Broken pipe|got 0 bytes|Timed out waiting \d+ms for"
    r"|\b(Peer|Server)Lost\b"
)
_ACCUSED = re.compile(
    r"PeerLost: ranks? (?P<ranks>\d+(?:, \d+)*) "
    r"(?P<did>did not answer|did not enter|has left|was silent|stood still)"
    r"(?P<how>[^\n(]*)"
)
"""How survivors' errors name the lost rank, as worded in `failure.detector`."""
_NO_STORE = "the launcher's store cannot be reached"
_AGREED = (
    re.compile(
        r"NonFinite: (?P<did>NaN or infinity in [^:]*?) on rank (?P<rank>\d+)[^:]*(?P<when>, in step \d+)"
    ),
    re.compile(
        r"UnevenData: rank (?P<rank>\d+) (?P<did>closed its session after \d+ steps)(?P<when>, [^:]*)"
    ),
)
"""Errors that all ranks raise about one of them."""
_SUMMARY = "Root Cause (first observed failure)"
_SUMMARY_ENTRY = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")


@dataclass(frozen=True)
class RankReport:
    """How a rank ended, and when it began to; `frozen`: it had been stopped, and had to be killed."""

    rank: int
    code: int
    time: float
    traceback: str | None = None
    frozen: bool = False

    @property
    def lost(self) -> bool:
        """Whether it ended because of another: it reports a lost peer, or the launcher ended it."""
        ended = self.code == -signal.SIGTERM or self.frozen
        return ended or bool(self.traceback and _LOST_PEER.search(self.traceback))

    @property
    def order(self) -> tuple[bool, float]:
        """A sort key: the cause comes before its consequences.

        A rank that exits closes its connections a good while before it is gone, so its peers may complain
        first; and a launcher sends SIGTERM to its other ranks when one has failed.
        """
        return self.lost, self.time


@dataclass
class Node:
    """What is known of one node during a run.

    Attributes:
        number: Which node.
        server: Which parameter server it is; None where it has ranks.
        code: How its launcher ended; None while it runs.
        ended: When.
        stopped: Whether we ended it, because another node failed or the time was up.
        last_lines: What its launcher and ranks printed last on stderr.
        reports: By rank, the report of one that ended badly.
        well: By rank, when it ended well.
        halted: By rank, since when it has been stopped (by SIGSTOP).
    """

    number: int
    server: int | None = None
    code: int | None = None
    ended: float = 0.0
    stopped: bool = False
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    reports: dict[int, RankReport] = field(default_factory=dict)
    well: dict[int, float] = field(default_factory=dict)
    halted: dict[int, float] = field(default_factory=dict)
    _reports: dict[int, RankReport] = field(default_factory=dict)
    _tracebacks: dict[int, str] = field(default_factory=dict)

    def end(self, code: int) -> None:
        """Its launcher has ended just now, with this exit code."""
        self.code, self.ended = code, time.monotonic()

    def stop(self) -> None:
        """Note that we end it from now on."""
        self.stopped = True

    def resume(self) -> None:
        """Note that it goes on after all."""
        self.stopped = False

    def hear(self, message: Mapping[str, Any]) -> RankReport | None:
        """Add a part of a report. Returns the report when it is whole.

        Reports of ranks that the testbed stopped are accepted, too, but are no failures.
        """
        rank = message["rank"]
        if "well" in message or "stopped" in message:
            self.halted.pop(rank, None)
            if message.get("stopped", True):
                (self.well if "well" in message else self.halted)[rank] = time.monotonic()
            return None
        if "traceback" in message:
            self._tracebacks[rank] = self._tracebacks.get(rank, "") + message["traceback"]
            return None
        trace, frozen = self._tracebacks.pop(rank, None), bool(message.get("frozen"))
        report = RankReport(rank, int(message["code"]), float(message["time"]), trace, frozen)
        self.reports[rank] = report
        if not self.stopped:
            self._reports[rank] = report
        return report

    @property
    def failed(self) -> bool:
        """Whether the node failed by itself."""
        return bool(self.code) and (not self.stopped or bool(self._reports))

    @property
    def cause(self) -> RankReport | None:
        """The report of the rank that failed first; None when the launcher failed without any."""
        first = min(self._reports.values(), key=lambda report: report.order, default=None)
        if first and not first.lost:
            return first
        # Perhaps the keeper of the rank was killed with it; torchrun knows then, though not why.
        seen = _summarized(self.last_lines, self.ended)
        return first if seen is None or seen.rank in self._reports else seen

    @property
    def order(self) -> tuple[bool, float]:
        """A sort key: the node that failed first comes before the others."""
        return self.cause.order if self.cause else (False, self.ended)

    def failure(self) -> Failure:
        """The failure of this node."""
        if (cause := self.cause) is not None:
            why = "froze: it was stopped, and had to be killed" if cause.frozen else reason(cause.code)
            return Failure(self.number, cause.rank, why, cause.traceback, cause.code)
        last = "\n".join(self.last_lines) or None
        return Failure(self.number, None, reason(self.code or 0), last, self.code, self.server)

    def endings(self) -> list[tuple[RankReport, Ending]]:
        """The reports of its ranks that ended badly, with their endings."""
        return [
            (report, Ending(rank, self.number, reason(report.code), report.traceback, report.lost))
            for rank, report in self.reports.items()
        ]


def silent(nodes: Sequence[Node], ranks_per_node: int) -> Failure | None:
    """The rank that failed without a report, if all others report only that they have lost it.

    It is named by the survivors' errors, or by its own rank.py, which found it stopped.
    """
    reports = {report.rank: report for node in nodes for report in node.reports.values()}
    failed = [report for node in nodes for report in node._reports.values()]
    if not failed or not all(report.lost for report in failed):
        return None
    for report in sorted(failed, key=lambda report: report.time):
        found = _ACCUSED.search(report.traceback or "")
        if found is not None:
            rank = int(found["ranks"].split(",")[0])
            return _accused(rank, rank // ranks_per_node, found, reports.get(rank))
    frozen = next((report for report in reports.values() if report.frozen), None)
    if frozen is None:
        return None
    return Failure(frozen.rank // ranks_per_node, frozen.rank, "froze: it was stopped, and answered nobody")


def agreed(nodes: Sequence[Node], ranks_per_node: int) -> Failure | None:
    """The rank that all ranks name as the cause, itself too, if that is how the first of them failed."""
    reports = [report for node in nodes for report in node._reports.values()]
    first = min(reports, key=lambda report: report.order, default=None)
    said = (each.search(first.traceback or "") for each in _AGREED) if first else ()
    found = next((each for each in said if each is not None), None)
    if first is None or found is None:
        return None
    rank = int(found["rank"])
    own = next((report.traceback for report in reports if report.rank == rank), first.traceback)
    did = f"{found['did']}{found['when']}"
    did = f"had {did}" if did.startswith("NaN") else did
    return Failure(rank // ranks_per_node, rank, did, own, first.code)


def parted(nodes: Sequence[Node]) -> Failure | None:
    """The first node, which holds the launcher's store, if no other node reaches it.

    From there the others seem to be gone, and its ranks report that.
    """
    first, *others = [node for node in nodes if node.server is None]
    lost = [
        node
        for node in others
        if any(_NO_STORE in (report.traceback or "") for report in node.reports.values())
    ]
    if not others or len(lost) < len(others):
        return None
    named = [f"node {node.number}" for node in others]
    if len(others) == 1:
        return Failure(first.number, None, f"and {named[0]} lost each other: look at the link between them")
    return Failure(
        first.number, None, f"was cut off: {', '.join(named[:-1])} and {named[-1]} did not reach it"
    )


def _accused(rank: int, node: int, found: re.Match[str], report: RankReport | None) -> Failure | None:
    """The failure of a rank by others' reports; None if its own report is more precise."""
    if report is not None and not report.lost:
        return None
    said = f"{found['did']}{found['how']}".strip().removesuffix(": gone or frozen")
    if found["did"] == "has left":
        return Failure(node, rank, f"left early: it {said}")
    if report is not None and report.frozen:
        return Failure(node, rank, f"froze: it {said}")
    if found["did"] == "did not answer":
        return Failure(node, rank, f"froze, or was cut off: it {said}")
    if found["did"] == "stood still":
        return Failure(node, rank, f"froze for a while: it {said}")
    return Failure(node, rank, f"was late: it {said}")


def reason(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _summarized(lines: Iterable[str], ended: float) -> RankReport | None:
    """The first failure in torchrun's summary."""
    _, title, summary = "\n".join(lines).rpartition(_SUMMARY)
    found = _SUMMARY_ENTRY.search(summary) if title else None
    return RankReport(int(found[1]), int(found[2]), ended) if found else None
