"""How ranks ended, told shortly: an error of all ranks is told once; the tracebacks are kept in files."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tacit
from tacit.cli.texts import clipped
from tacit.files import put, spared
from tacit.lab.testbed.results import Ending, verb

__all__ = ["Group", "grouped", "kept", "told"]

_FRAMES = 4
"""Of the user's own code, from where the error was raised."""
_GROUPS = 4
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line \d+')
_OTHERS = (str(Path(tacit.__file__).parent), *sysconfig.get_paths().values(), "<frozen")
"""Where code is that is not the user's."""


@dataclass(frozen=True)
class Group:
    """Ranks that ended alike.

    Attributes:
        ranks: which.
        reason: how, such as "exit code 1".
        error: the error's own lines; none where there is no traceback.
        frames: where it was raised in the user's code: the lines of a traceback.
    """

    ranks: tuple[int, ...]
    reason: str
    error: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """Such as "ranks 0, 2 and 3"."""
        *first, last = map(str, self.ranks)
        return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def grouped(endings: Iterable[Ending]) -> list[Group]:
    """Ranks by how they ended, in order of the first of each; those that the launcher ended are left out."""
    found: dict[tuple[str, tuple[str, ...]], Group] = {}
    for ending in endings:
        if ending.traceback is None and ending.lost:
            continue
        frames, error = _parts(ending.traceback or "")
        key = (ending.reason, error)
        before = found.get(key, Group((), ending.reason, error, frames))
        found[key] = Group(tuple(sorted({*before.ranks, ending.rank})), *key, before.frames)
    return [*found.values()]


def told(groups: Sequence[Group], blamed: str) -> list[str]:
    """The first group at some length, of the others a line each.

    Args:
        blamed: who has been named already as the one that failed.
    """
    lines: list[str] = []
    for i, group in enumerate(groups[:_GROUPS]):
        if i == 0:
            lines += [*group.frames, *group.error]
            lines += [] if group.who in blamed else [f"({group.who} said so)"]
        else:
            error = group.error or (verb(group.reason),)
            lines.append(f"{group.who}: {error[0]}")
    if len(groups) > _GROUPS:
        more = sum(len(group.ranks) for group in groups[_GROUPS:])
        lines.append(f"and {more} more ranks, each of which says something else")
    return [clipped(line) for line in lines]


def kept(endings: Iterable[Ending], folder: Path) -> list[str]:
    """Write each rank's traceback into a file of its own; their names, without the folder."""
    traces: Mapping[str, str] = {
        f"rank{ending.rank}.txt": ending.traceback for ending in endings if ending.traceback
    }
    names: list[str] = []
    with spared(f"tracebacks are not kept in {folder}"):
        if traces:
            folder.mkdir(exist_ok=True)
        for name in sorted(traces, key=lambda name: (len(name), name)):
            put(folder / name, traces[name] + "\n")
            names.append(name)
    return names


def _parts(traceback: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the last traceback of a chain: the frames of the user's own code, and the error."""
    lines = traceback.splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith("Traceback ")), default=-1) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith(" ")), len(lines))
    error = tuple(line for line in lines[end:] if line.strip())
    starts = [i for i in range(start, end) if _FRAME.match(lines[i])]
    frames = [lines[i:j] for i, j in pairwise([*starts, end])]
    own = [frame for frame in frames if not _is_of_others(frame[0])]
    shown = own[-_FRAMES:] or frames[-1:]
    return tuple(line for frame in shown for line in frame), error


def _is_of_others(line: str) -> bool:
    found = _FRAME.match(line)
    return found is not None and found["file"].startswith(_OTHERS)
