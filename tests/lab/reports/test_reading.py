from pathlib import Path

import pytest
from sample_records import WHOLE

from tacit.errors import ConfigError
from tacit_lab import records, reports

LINES = [record.to_json() for record in WHOLE]


def salvage(folder: Path, text: str) -> tuple[int, bool]:
    (folder / "records.jsonl").write_text(text, encoding="utf-8")
    found, cut = reports.salvage(folder / "records.jsonl", records.read)
    assert found == WHOLE[: len(found)]
    return len(found), cut


def test_whole_records_are_read_with_or_without_a_last_newline(tmp_path: Path) -> None:
    assert salvage(tmp_path, "\n".join(LINES)) == (len(WHOLE), False)
    assert salvage(tmp_path, "\n".join(LINES) + "\n") == (len(WHOLE), False)
    assert salvage(tmp_path, "") == (0, False)


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    assert salvage(tmp_path, "\n".join(LINES)[:-5]) == (len(WHOLE) - 1, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "epo\n', "line 2: not a record"),
        ('{"kind": "epo\n{"kind":', "line 2: not a record"),
        ('{"kind": "end", "version": 99}', "line 2: this record has version 99"),
    ],
)
def test_any_other_broken_line_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        salvage(tmp_path, f"{LINES[0]}\n{line}")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        reports.salvage(tmp_path / "records.jsonl", records.read)
