"""Report to `tacit run` what a script did with tacit: which functions it called, and its sessions' numbers.

If the environment variable `TACIT_FOOTPRINT` names a folder, every rank writes one small file into it,
`rank<r>.json`; else nothing happens. A file is replaced as a whole, so that nobody reads half of one. It is
written once more when the interpreter exits, so that sessions that are never closed count, too. If the folder
cannot be written, a note says so once, and the script goes on.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any, Protocol

from tacit import files
from tacit.environment import FOOTPRINT, WORKER
from tacit.planning.decider import Choice
from tacit.strategy import AnyStrategy


class Counted(Protocol):
    """An attached session, which is reported on."""

    strategy: AnyStrategy

    @property
    def choice(self) -> Choice | None:
        """What `auto` has chosen."""

    def metrics(self) -> dict[str, float]:
        """The session's numbers."""


_CALLED: list[str] = []
_OPEN: list[Counted] = []
_CLOSED: list[dict[str, Any]] = []


def called(function: str) -> None:
    """Report that the script calls this function of tacit, before it can fail."""
    if FOOTPRINT in os.environ and function not in _CALLED:
        _CALLED.append(function)
        _write()


def began(session: Counted) -> None:
    """Report on this session from now on."""
    if FOOTPRINT not in os.environ:
        return
    if not _OPEN and not _CLOSED:
        atexit.register(_at_exit, os.getpid())
    _OPEN.append(session)


def ended(session: Counted) -> None:
    """Write the last numbers of a session that was closed."""
    if session in _OPEN:
        _OPEN.remove(session)
        _CLOSED.append(_numbers(session, closed=True))
        _write()


def _numbers(session: Counted, *, closed: bool) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "strategy": session.strategy.name,
        "closed": closed,
        "metrics": session.metrics(),
    }
    return numbers if session.choice is None else {**numbers, "choice": session.choice.to_json()}


def _at_exit(process: int) -> None:
    if os.getpid() == process:  # and not one that it has forked
        _write()


def _write() -> None:
    rank = int(os.environ.get(WORKER, os.environ.get("RANK", "0")))
    open_ = [_numbers(session, closed=False) for session in _OPEN]
    text = json.dumps({"rank": rank, "called": _CALLED, "sessions": [*_CLOSED, *open_]})
    folder = Path(os.environ[FOOTPRINT])
    with files.spared(f"the numbers of the sessions are not kept in {folder}"):
        files.put(folder / f"rank{rank}.json", text)
