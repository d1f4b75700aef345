"""Write down what a comparison records and prints. If it cannot be written, the comparison goes on."""

from __future__ import annotations

from pathlib import Path

from tacit.files import Log, spared
from tacit.timelines import Timeline
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.records import EndRecord, Record, RunKey, read
from tacit_lab.reports import salvage


class ComparisonRecorder:
    """Keeps records in memory, for the summary, and writes them into the comparison's folder if it can.

    The file is opened by its name for each line, so that a folder that was deleted is noticed.

    Attributes:
        records: All records so far, in order, those of an earlier call among them.
    """

    def __init__(self, options: CompareOptions) -> None:
        """Write into the folder of these options, and go on from what it holds."""
        self.records = salvage(options.records, read)[0] if options.records.is_file() else []
        self._options = options

    @property
    def ends(self) -> dict[RunKey, EndRecord]:
        """How each run has ended, by the last of its records."""
        return {record.key: record for record in self.records if isinstance(record, EndRecord)}

    def add(self, record: Record | Timeline) -> None:
        """Keep a record of a training, or a rank's timeline."""
        if isinstance(record, Timeline):
            append_line(self._options.timeline, record.to_json())
        else:
            self.records.append(record)
            append_line(self._options.records, record.to_json())

    def add_output(self, line: str) -> None:
        """Keep a line that a rank printed."""
        append_line(self._options.output, line)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; if it cannot be written, a note says so once."""
    with spared(f"{path.name} is not whole"):
        log = Log(path)
        try:
            log.write(line)
        finally:
            log.close()
