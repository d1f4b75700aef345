"""`tacit report`, and the page that `tacit compare` leaves behind."""

import csv
import itertools
import json
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sample_records import DDP, HEAD
from sample_timelines import run

from tacit.files import Log
from tacit.json_lines import Line
from tacit_lab import cli
from tacit_lab.cli import report
from tacit_lab.cli.compare import options
from tacit_lab.cli.compare.recorder import ComparisonRecorder
from tacit_lab.cli.interrupts import Interrupted
from tacit_lab.study.jobs import Ended, StudyRun, append
from tacit_lab.study.search import Rule, Study


def write(path: Path, *lines: Line) -> None:
    with closing(Log(path)) as log:
        for each in lines:
            log.write(each.to_json())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / options.RECORDS, HEAD, DDP)
    return tmp_path / "run"


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of `tacit report`."""
    monkeypatch.setattr(sys, "argv", ["tacit", "report", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_the_page_is_written_into_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, str(folder)) == 0
    assert capsys.readouterr().out == f"Report: {folder / 'report.html'}\n"
    assert "ddp trained in 60.0" in (folder / "report.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["records.jsonl", "report.html"]


def test_the_page_is_written_elsewhere_on_demand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, str(folder), "--out", str(tmp_path / "other.html")) == 0
    assert (tmp_path / "other.html").exists()
    assert not (folder / "report.html").exists()


def test_a_cut_last_line_does_not_hide_the_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"kind": "ep')
    assert called(monkeypatch, str(folder)) == 0
    assert "cut short" in (folder / "report.html").read_text(encoding="utf-8")


def test_what_cannot_be_is_one_line_and_no_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, str(tmp_path / "nowhere")) == 2
    assert "nowhere holds no records.jsonl or study.json" in capsys.readouterr().err
    assert called(monkeypatch, str(folder), "--out", str(tmp_path / "nowhere" / "page.html")) == 2
    assert "cannot write" in capsys.readouterr().err
    with (folder / "records.jsonl").open("a") as file:
        file.write(replace(DDP, version=99).to_json() + "\n")
    assert called(monkeypatch, str(folder)) == 2
    error = capsys.readouterr().err
    assert "line 3: this record has version 99, and this tacit reads up to 1: update tacit" in error
    assert error.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_field_of_another_type_is_named_with_its_file_and_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "records.jsonl"
    file.write_text(file.read_text().replace('"seconds": 60.0', '"seconds": "an hour"'))
    assert called(monkeypatch, str(folder)) == 2
    assert capsys.readouterr().err == (
        f"tacit: {file}, line 2: seconds is 'an hour' in this EndRecord: write a finite number or null\n"
    )


def test_a_name_that_is_no_text_does_not_spoil_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / options.RECORDS, replace(DDP, status="failed", error="cannot read a\udcff.py"))
    assert called(monkeypatch, str(folder)) == 0
    assert "cannot read a?.py" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_commands_agree_on_the_names_of_files() -> None:
    assert (report.RECORDS, report.TIMELINE) == (options.RECORDS, options.TIMELINE)


def run_compare(
    monkeypatch: pytest.MonkeyPatch, folder: Path, error: BaseException | None, finished: bool = False
) -> int:
    """The exit code of a comparison that writes a run down and ends so, without training anything.

    Args:
        finished: whether another run ended well.
    """

    def train_all(asked: options.CompareOptions, shown: object, recorder: ComparisonRecorder) -> None:
        recorder.add(HEAD)
        recorder.add(DDP if error is None else replace(DDP, status="interrupted", error=str(error)))
        if finished:
            recorder.add(replace(HEAD, algorithm="topk"))
            recorder.add(replace(DDP, algorithm="topk"))
        if error is not None:
            raise error

    monkeypatch.setattr("tacit_lab.cli.compare.runner.train_all", train_all)
    monkeypatch.setattr(sys, "argv", ["tacit", "compare", "--out", str(folder)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_compare_leaves_a_page_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_compare(monkeypatch, tmp_path, None) == 0
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_an_interrupted_comparison_leaves_a_page_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_compare(monkeypatch, tmp_path, Interrupted(15)) == 143
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().err
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "ddp was interrupted: stopped by SIGTERM" in text


def test_an_interrupted_comparison_shows_the_table_of_what_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_compare(monkeypatch, tmp_path, Interrupted(15), finished=True) == 143
    told = capsys.readouterr().err
    assert "ddp (interrupted)" in told
    assert [line.split()[-1] for line in told.splitlines() if line.startswith("topk ")] == ["–"]


def test_a_page_that_cannot_be_built_does_not_spoil_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / report.PAGE).mkdir()
    assert run_compare(monkeypatch, tmp_path, None) == 0
    assert "Report: none, cannot write" in capsys.readouterr().out


# ---- timelines ----------------------------------------------------------------------------------------


@pytest.fixture
def timed_folder(folder: Path) -> Path:
    """What `tacit compare` leaves where the ranks told what they did when."""
    write(folder / options.TIMELINE, *run("ddp"), *run("a/b:c=1"))
    return folder


def test_a_trace_of_every_algorithm_goes_beside_the_page(
    timed_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, str(timed_folder)) == 0
    traces = timed_folder / report.TRACES
    assert capsys.readouterr().out.splitlines() == [
        f"Report: {timed_folder / 'report.html'}",
        f"Traces: {traces}, to open in ui.perfetto.dev or chrome://tracing",
    ]
    assert sorted(path.name for path in traces.iterdir()) == ["a_b_c=1.json", "ddp.json"]
    whole = json.loads((traces / "a_b_c=1.json").read_text())
    assert whole["otherData"]["algorithm"] == "a/b:c=1"
    assert {event["pid"] for event in whole["traceEvents"]} == {0, 1, 2, 3}
    assert "What the ranks were doing" in (timed_folder / "report.html").read_text(encoding="utf-8")


def test_traces_go_where_the_page_goes(
    timed_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, str(timed_folder), "--out", str(tmp_path / "other.html")) == 0
    assert (tmp_path / "traces" / "ddp.json").exists()
    assert not (timed_folder / "traces").exists()


def test_a_timeline_that_was_cut_short_is_left_out_and_a_broken_one_is_named(
    timed_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = timed_folder / options.TIMELINE
    text = file.read_text()
    file.write_text(text[:-100])
    assert called(monkeypatch, str(timed_folder)) == 0
    trace = json.loads((timed_folder / "traces" / "a_b_c=1.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2}
    file.write_text(text.replace('"steps": [[0, ', '"steps": [["first", ', 1))
    assert called(monkeypatch, str(timed_folder)) == 2
    assert f"{file}, line 1: ['first'" in capsys.readouterr().err


def test_a_folder_for_traces_that_cannot_be_is_said(
    timed_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (timed_folder / "traces").touch()
    assert called(monkeypatch, str(timed_folder)) == 2
    assert f"cannot write {timed_folder / 'traces'}" in capsys.readouterr().err


@pytest.fixture
def studied(tmp_path: Path) -> Path:
    """The folder of a study of two algorithms and two lengths."""
    found = {}
    for steps, arm, lost in itertools.product((100, 200), ("dense", "topk", "powersgd"), (0, 0.01)):
        seed = int(lost > 0)
        job = StudyRun("digits", arm, steps, seed, 0.5)
        gap = 0.0 if arm == "dense" else 0.05 + lost
        share = {"dense": 1.0, "topk": 0.03, "powersgd": 0.02}[arm]
        found[job] = Ended(job, 0.9 - gap, 0.9, 0.1, share, 1.0, asdict(HEAD.environment))
    folder = tmp_path / "study"
    folder.mkdir()
    for each in found.values():
        append(folder / report.RUNS, each)
    wanted = [("digits", arm, steps) for steps in (100, 200) for arm in ("dense", "topk", "powersgd")]
    rows = Study({"digits": Rule()}, "dense", (0.5,)).rows(found, wanted, (0, 1))
    study = {"task": "digits", "plain": "dense", "seeds": [0, 1], "rates": [0.5], "rows": rows}
    (folder / report.STUDY).write_text(json.dumps({**study, "command": "tacit study digits"}))
    return folder


def test_of_a_study_there_are_a_page_and_what_a_paper_takes(
    studied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, str(studied)) == 0
    assert "digits: gaps to dense" in (studied / "study.html").read_text()
    files = [str(tmp_path / f"t.{ending}") for ending in ("tex", "csv", "png")]
    assert called(monkeypatch, str(studied), "--latex", files[0], "--csv", files[1], "--png", files[2]) == 0
    text = (tmp_path / "t.tex").read_text()
    assert "% digits; seeds 0, 1\n% command: tacit study digits\n% python: " in text
    assert "% topk, 100 steps: learning rate x0.5\n" in text
    assert (
        r"\texttt{topk}~\cite{arxiv-1704.05021,arxiv-1809.07599} & 200 & 3.00\% & 84.50 & $-$5.50~$\pm$~6.35"
        in text
    )
    assert r"& 100 & 100.00\% & 90.00 & -- \\" in text
    assert "{arxiv-1905.13727," in (tmp_path / "t.bib").read_text()
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [row["steps"] for row in rows] == ["100"] * 3 + ["200"] * 3
    assert float(rows[1]["gap"]) == pytest.approx(-0.055)
    assert rows[1]["seeds"] == "2"
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_of_a_study_without_a_gap_there_is_nothing(
    studied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (studied / report.STUDY).write_text(json.dumps({"task": "digits", "plain": "dense", "rows": []}))
    assert called(monkeypatch, str(studied), "--csv", "t.csv") == 2
    assert "holds no gap yet" in capsys.readouterr().err
