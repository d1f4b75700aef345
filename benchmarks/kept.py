"""Rows of a benchmark that is not over, so that it can go on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paired import ROOT
from runs import append, lines
from tacit.files import put


def fingerprint(*own: str) -> str:
    """What tells the code that makes rows from any other, committed or not: src, and these benchmarks."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks" / name for name in own)]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


class StateSlice:
    """The finished rows, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = list(lines(path, json.loads))
        self._used: list[dict[str, Any]] = []

    def find(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The last finished row that begins as this one."""
        found = next((each for each in reversed(self._rows) if row.items() <= each.items()), None)
        if found is not None:
            self._used.append(found)
        return found

    def keep(self, row: dict[str, Any]) -> None:
        """Write a finished row down at once."""
        self._rows.append(row)
        self._used.append(row)
        append(self._path, json.dumps(row))

    def forget(self) -> None:
        """The run is over: drop what it has found here and kept."""
        self._rows = [each for each in self._rows if each not in self._used]
        self._used = []
        if self._path.is_file():
            put(self._path, "".join(json.dumps(each) + "\n" for each in self._rows))
