"""Why ranks failed, in few lines: an error that several ranks raise is shown once. Tracebacks go to files."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tacit
from tacit.files import put, spared
from tacit_lab.cli.parsing import shortened
from tacit_lab.testbed.results import Ending, verb

_FRAMES = 4
"""The most frames of the user's code that are shown, the last ones."""
_GROUPS = 4
"""At most so many groups are shown."""
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line \d+')
_LIBRARIES = (str(Path(tacit.__file__).parent), *sysconfig.get_paths().values(), "<frozen")
"""Folders of code that is not the user's."""


@dataclass(frozen=True)
class FailureGroup:
    """Ranks that ended in the same way, with the same error.

    Attributes:
        ranks: Their numbers, in order.
        reason: How they ended, such as "exit code 1".
        error: The lines of the error's message; empty if there is no traceback.
        frames: The lines of the traceback that are about the user's code.
    """

    ranks: tuple[int, ...]
    reason: str
    error: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """Such as "ranks 0, 2 and 3"."""
        return named(self.ranks)


def named(ranks: Iterable[int]) -> str:
    """Such as "ranks 0, 2 and 3"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def dragged_along(endings: Iterable[Ending]) -> tuple[int, ...]:
    """The ranks that were ended because others had failed, before they could say anything of it."""
    return tuple(sorted({each.rank for each in endings if _dragged(each)}))


def group_endings(endings: Iterable[Ending]) -> list[FailureGroup]:
    """Group ranks by how they ended, in the order of each group's first ending.

    Ranks that the launcher ended, because others had failed, are left out.
    """
    groups: dict[tuple[str, tuple[str, ...]], FailureGroup] = {}
    for ending in endings:
        if _dragged(ending):
            continue
        frames, error = _parts(ending.traceback or "")
        key = (ending.reason, error)
        before = groups.get(key, FailureGroup((), ending.reason, error, frames))
        groups[key] = FailureGroup(tuple(sorted({*before.ranks, ending.rank})), *key, before.frames)
    return [*groups.values()]


def format_groups(groups: Sequence[FailureGroup], summary: str) -> list[str]:
    """Lines for the user: the first group with its frames, and a line for each of the others.

    Args:
        summary: The line above these. It may name the first group's ranks already.
    """
    lines: list[str] = []
    for i, group in enumerate(groups[:_GROUPS]):
        if i == 0:
            lines += [*group.frames, *group.error]
            lines += [] if group.who in summary else [f"({group.who} ended so)"]
        else:
            error = group.error or (verb(group.reason),)
            lines.append(f"{group.who}: {error[0]}")
    if len(groups) > _GROUPS:
        more = sum(len(group.ranks) for group in groups[_GROUPS:])
        lines.append(f"and {more} more ranks, each with another error")
    return [shortened(line) for line in lines]


def write_tracebacks(endings: Iterable[Ending], folder: Path) -> list[str]:
    """Write each rank's traceback into a separate file. Returns the files' names, without the folder."""
    tracebacks: Mapping[str, str] = {
        f"rank{ending.rank}.txt": ending.traceback for ending in endings if ending.traceback
    }
    names: list[str] = []
    with spared(f"tracebacks are not saved in {folder}"):
        if tracebacks:
            folder.mkdir(exist_ok=True)
        for name in sorted(tracebacks, key=lambda name: (len(name), name)):
            put(folder / name, tracebacks[name] + "\n")
            names.append(name)
    return names


def _dragged(ending: Ending) -> bool:
    return ending.traceback is None and ending.lost


def _parts(traceback: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The frames of the user's code and the error, of the last traceback in a chain of them."""
    lines = traceback.splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith("Traceback ")), default=-1) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith(" ")), len(lines))
    error = tuple(line for line in lines[end:] if line.strip())
    starts = [i for i in range(start, end) if _FRAME.match(lines[i])]
    frames = [lines[i:j] for i, j in pairwise([*starts, end])]
    own = [frame for frame in frames if not _is_library(frame[0])]
    shown = own[-_FRAMES:] or frames[-1:]
    return tuple(line for frame in shown for line in frame), error


def _is_library(line: str) -> bool:
    found = _FRAME.match(line)
    return found is not None and found["file"].startswith(_LIBRARIES)
