"""One output of a node's launcher: its ranks' lines, and the reports among them."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO

from tacit_lab.testbed.failure_attribution import Node, RankReport
from tacit_lab.testbed.rank import BREAKING, MARK

OnLine = Callable[[int, str], None]

PATIENCE = 30.0
"""Seconds that the traceback of an error that nothing has caught waits for the end of its rank."""

_DOUBT = 3.0
"""Seconds that any other traceback does: most are logged by ranks that go on."""

_TRACEBACK = "Traceback (most recent call last):"
_UNCAUGHT = re.compile(r"^\[rank\d+\]: ?")
_ELASTIC = re.compile(r"[WE]\d{4} [\d:.]+ +\d+ (\S*/)?torch/distributed/elastic/")
"""Where the environment lies below the working directory, the path begins there."""


class Output:
    """One output of a node's launcher, cut into lines."""

    def __init__(
        self,
        node: Node,
        stream: TextIO,
        on_line: OnLine | None,
        on_note: Callable[[str], None],
        holding: bool = False,
    ) -> None:
        """Give lines to the function, or print them on the stream; notes of ranks go to `on_note`.

        `holding`: the lines of a rank's traceback wait a while, for the rank may be about to end by it: its
        report holds them then, and they are not printed. Nor is what the launcher says of that.
        """
        self._node = node
        self._stream = stream
        self._on_line = on_line
        self._on_note = on_note
        self._holding = holding
        self._held: list[_HeldLine] = []
        self._parts: dict[int, str] = {}
        self._of_launcher = False
        self._rest = b""
        self._summarize = stream is sys.stderr

    def feed(self, data: bytes) -> None:
        """Take in what was read; nothing means the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._line(line.decode(errors="replace"))

    def _line(self, line: str) -> None:
        before, mark, report = line.partition(MARK)
        if mark and self._heard(report):
            line = before
            if not line:
                return
        if self._summarize:
            self._node.last_lines.append(line)
        if self._holding and self._is_of_launcher(line):
            return
        self._emit(line)

    def _emit(self, line: str) -> None:
        if self._on_line is not None:
            self._on_line(self._node.number, line)
        else:
            print(line, file=self._stream, flush=True)

    def _heard(self, report: str) -> bool:
        """Take a report of a rank or its rank.py. Returns whether it is one, and not a program's output."""
        try:
            message = json.loads(report)
            if "note" in message:
                self._on_note(str(message["note"]))
            elif "line" in message:
                self._traced(message["rank"], str(message["line"]), "more" in message)
            elif (ended := self._node.hear(message)) is not None:
                self._release(ended)
        except (ValueError, TypeError, KeyError):
            return False
        return True

    def _traced(self, rank: int, text: str, more: bool) -> None:
        """Take a line of a traceback, or a part of one."""
        line = self._parts.pop(rank, "") + text
        if more:
            self._parts[rank] = line
        elif self._holding:
            patience = PATIENCE if line.startswith("[rank") else _DOUBT
            self._held.append(_HeldLine(time.monotonic() + patience, rank, line))
        else:
            self._emit(line)

    def _release(self, ended: RankReport) -> None:
        """Print the held lines of an ended rank, except those in its report."""
        told = {"", *(ended.traceback or "").split("\n")}
        mine = [each for each in self._held if each.rank == ended.rank]
        self._held = [each for each in self._held if each.rank != ended.rank]
        for each in mine:
            beside = bool(ended.traceback) and BREAKING.match(each.line)
            if not beside and _UNCAUGHT.sub("", each.line) not in told:
                self._emit(each.line)

    def flush(self, now: float = math.inf) -> None:
        """Print the lines that have waited long enough: their rank goes on."""
        due = [each for each in self._held if each.until <= now]
        self._held = [each for each in self._held if each.until > now]
        for each in due:
            self._emit(each.line)

    @property
    def until(self) -> float:
        """When the next line has waited long enough."""
        return min((each.until for each in self._held), default=math.inf)

    def _is_of_launcher(self, line: str) -> bool:
        """Whether this is torchrun on its ranks' failure; no rank prints a traceback that is not marked."""
        self._of_launcher |= self._summarize and line == _TRACEBACK
        return self._of_launcher or bool(_ELASTIC.match(line))


class _HeldLine(NamedTuple):
    until: float
    rank: int
    line: str
