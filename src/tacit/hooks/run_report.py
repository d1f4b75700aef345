"""What a script did with tacit, left in a folder for `tacit run` to read: who was called, and the numbers.

Where the environment variable `TACIT_FOOTPRINT` names a folder, every rank keeps one small file there,
`rank<r>.json`. Where it is not set, nothing happens. A file is replaced as a whole, so that a reader never
meets half of one. The last word is left when the interpreter ends, so sessions that nobody closes count too.
A folder that cannot be written is said once, and the script goes on.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any, Protocol

from tacit import files
from tacit.strategy import AnyStrategy


class Counted(Protocol):
    """What is told of: an attached session."""

    strategy: AnyStrategy

    def metrics(self) -> dict[str, float]:
        """Its numbers."""


VARIABLE = "TACIT_FOOTPRINT"

_CALLED: list[str] = []
_OPEN: list[Counted] = []
_CLOSED: list[dict[str, Any]] = []


def called(door: str) -> None:
    """Note that the script called this door, before anything can go wrong in it."""
    if VARIABLE in os.environ and door not in _CALLED:
        _CALLED.append(door)
        _write()


def began(session: Counted) -> None:
    """Remember a session, for its numbers at the end."""
    if VARIABLE not in os.environ:
        return
    if not _OPEN and not _CLOSED:
        atexit.register(_write)
    _OPEN.append(session)


def ended(session: Counted) -> None:
    """Write the numbers of a session that was closed, and let go of it."""
    if session in _OPEN:
        _OPEN.remove(session)
        _CLOSED.append(_told(session, closed=True))
        _write()


def _told(session: Counted, *, closed: bool) -> dict[str, Any]:
    return {"strategy": session.strategy.name, "closed": closed, "metrics": session.metrics()}


def _write() -> None:
    rank = int(os.environ.get("TACIT_WORKER", os.environ.get("RANK", "0")))
    open_ = [_told(session, closed=False) for session in _OPEN]
    text = json.dumps({"rank": rank, "called": _CALLED, "sessions": [*_CLOSED, *open_]})
    folder = Path(os.environ[VARIABLE])
    with files.spared(f"the numbers of the sessions are not kept in {folder}"):
        files.put(folder / f"rank{rank}.json", text)
