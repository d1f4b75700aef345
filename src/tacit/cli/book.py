"""What a comparison writes down while it goes on; a folder that takes nothing more never ends it."""

from __future__ import annotations

from pathlib import Path

from tacit.cli.request import Request
from tacit.files import Log, spared
from tacit.lab.records import Record
from tacit.timelines import Timeline

__all__ = ["Book"]


class Book:
    """Keeps records in memory, for the summary, and in the request's folder as far as that takes them.

    Each line is written to the file that has the name now, so that it is noticed when a folder is deleted.

    Attributes:
        records: all that were kept, in order.
    """

    def __init__(self, request: Request) -> None:
        """Write into the request's folder."""
        self.records: list[Record] = []
        self._request = request

    def keep(self, record: Record | Timeline) -> None:
        """Keep a record of a run, or what a rank did when."""
        if isinstance(record, Timeline):
            self._append(self._request.timeline, record.to_json())
        else:
            self.records.append(record)
            self._append(self._request.records, record.to_json())

    def print(self, line: str) -> None:
        """Keep a line that a rank printed."""
        self._append(self._request.output, line)

    def _append(self, path: Path, line: str) -> None:
        with spared(f"{path.name} is not whole"):
            log = Log(path)
            try:
                log.write(line)
            finally:
                log.close()
