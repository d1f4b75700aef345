"""Read a folder's records also after a run that was killed while it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from tacit.errors import ConfigError
from tacit.records import Record, read

__all__ = ["salvage"]


def salvage(path: Path) -> tuple[list[Record], bool]:
    """All whole records of a file, and whether its last line was cut short.

    Raises:
        ConfigError: The file cannot be read, or another line than the last is broken or of a newer version.
    """
    found: list[Record] = []
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
