"""Read a folder's records also after a run that was killed while it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tacit.errors import ConfigError
from tacit_lab.records import Line

L = TypeVar("L", bound=Line)


def salvage(path: Path, read: Callable[[Path], Iterator[L]]) -> tuple[list[L], bool]:
    """All whole records of a file, as `read` reads them, and whether its last line was cut short.

    Raises:
        ConfigError: The file cannot be read, or another line than the last is broken or of a newer version.
    """
    found: list[L] = []
    try:
        found.extend(read(path))
    except ConfigError:
        if not _is_cut(path, len(found)):
            raise
        return found, True
    return found, False


def _is_cut(path: Path, whole: int) -> bool:
    """Whether line `whole + 1` is the last, lacks its end, and is no JSON."""
    try:
        lines = path.read_bytes().split(b"\n")
        if len(lines) != whole + 1 or not lines[-1]:
            return False
        json.loads(lines[-1])
    except OSError:
        return False
    except ValueError:
        return True
    return False
