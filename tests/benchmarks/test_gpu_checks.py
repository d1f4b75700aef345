"""What gpu.py runs: its order and time, its record, what a failure does; and that checks work, on a CPU."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import gpu
import gpu_kernels
import gpu_profile
import gpu_replicas
import gpu_steps
import gpu_suites
from cases import for_each
from gpu_checks import CPU, Check, Setting

MINUTES = 12


def check(name: str, seconds: int = 60, fills: bool = False) -> Check:
    return Check(name, seconds, "nothing", lambda _: {}, fills)


THREE = [check("a"), check("b", 100), check("c", 30, fills=True)]


class Machine:
    """Takes the seconds that a check should take, and fails those that are named."""

    begun = True

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.now, self.ran, self.fails = 0.0, [], fails

    def __call__(self, _: object) -> "Machine":
        return self

    def run(self, each: Check, seconds: float, found: Mapping[str, Any]) -> dict[str, Any]:
        self.ran.append(each.name)
        self.now += seconds if each.fills else each.seconds
        failed = {"error": "Traceback\nValueError: it is broken"}
        return failed if each.name in self.fails else {"seconds": seconds, "before": [*found]}

    def end(self) -> None:
        pass


def ran(
    monkeypatch: pytest.MonkeyPatch, record: Path, minutes: float, fails: tuple[str, ...] = ()
) -> tuple[list[str], bool]:
    machine = Machine(fails)
    monkeypatch.setattr(gpu, "Worker", machine)
    monkeypatch.setattr(gpu, "machine", lambda _: {"device": "a GPU"})
    monkeypatch.setattr(gpu.time, "monotonic", lambda: machine.now)
    well = gpu.carry_out(THREE, minutes, record, gpu.CUDA)
    return machine.ran, well


def test_a_first_call_comes_to_the_trainings_and_a_second_one_to_what_is_behind_them() -> None:
    last = max(i for i, each in enumerate(gpu.CHECKS) if each.fills)
    first, second = gpu.CHECKS[: last + 1], gpu.CHECKS[last + 1 :]
    assert gpu.BEGINNING + sum(each.seconds for each in first) <= 60 * MINUTES
    assert gpu.BEGINNING + sum(each.seconds for each in second) <= 60 * MINUTES
    names = [each.name for each in gpu.CHECKS]
    assert len({*names}) == len(names)
    assert names[0] == "steps: dense"
    assert [each.name for each in gpu.CHECKS if each.fills] == [each.name for each in first[-4:]]
    assert "no time" not in gpu.plan(first, MINUTES)
    assert gpu.plan(gpu.CHECKS, MINUTES).count("no time") == len(second)
    assert gpu.plan(gpu.CHECKS, 1).count("no time") > 10


def test_a_second_call_goes_on_where_the_first_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    assert ran(monkeypatch, record, 1.1) == (["a"], True)
    assert ran(monkeypatch, record, 2.5) == (["b", "c"], True)
    assert ran(monkeypatch, record, 12) == ([], True)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["found"]["seconds"] for row in rows] == [pytest.approx(66), 150, pytest.approx(50)]
    assert [row["found"]["before"] for row in rows] == [[], ["a"], ["a", "b"]]


def test_what_failed_runs_again_after_what_has_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record"
    assert ran(monkeypatch, record, 1.1, ("a",)) == (["a"], False)
    assert "FAILED a: ValueError: it is broken" in capsys.readouterr().out
    assert ran(monkeypatch, record, 12) == (["b", "c"], True)
    assert "a: not begun, it takes 60 s and 0 are left" in capsys.readouterr().out
    assert ran(monkeypatch, record, 12) == (["a"], True)
    with record.open("a") as file:
        file.write('{"check": "a", "device": "another", "found": {}}\n')
    assert [*gpu.recorded(record, "another")] == ["a"]
    assert "not run: steps: dense" in gpu.table(gpu.recorded(record, "a GPU"))


def test_a_goal_that_is_missed_is_said() -> None:
    found = {"verdicts": gpu_kernels.judged([{"codec": "topk 1%", "task": "encode + EF", "copies": 7.3}])}
    row = {"check": "kernels: topk", "device": "a GPU", "found": found}
    assert gpu.told(row) == "MISSED topk 1%, encode + EF: copies 7.3, at most 3"
    assert gpu.told({**row, "device": "cpu"}) == "works  kernels: topk"


def test_checks_are_chosen_by_how_their_names_begin() -> None:
    assert [each.name for each in gpu.chosen("kernels: topk,wire")] == ["kernels: topk", "wire"]
    with pytest.raises(ValueError, match="no check's name begins with 'kernel s': the parts are steps, ker"):
        gpu.chosen("wire,kernel s")
    assert [each.name for each in gpu.chosen("clock")] == ["wire", "clock"], "compared with what wire found"


@for_each("text", [None, "", '{\n  "steps": []\n}\n', '{"check": "wire"}\n'])
def test_the_table_of_what_is_no_record_is_an_error(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--table", str(path)])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    why = "there is no such file" if text is None else "no line of it is a check's result"
    assert f"--table {path}: {why}" in capsys.readouterr().err


def test_a_table_passes_over_a_line_that_is_not_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record"
    path.write_text('{"check": "wi\n{"check": "laws", "device": "a GPU", "found": {}}\n')
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--table", str(path)])
    assert gpu.main() == 0
    said = capsys.readouterr()
    assert said.out.startswith("a GPU\nnot run: steps: dense")
    assert "passed over" in said.err


def test_a_dry_call_says_where_the_record_goes_and_what_is_needed(tmp_path: Path) -> None:
    said = gpu.needs(gpu.chosen("clock,ranks"), tmp_path)
    assert f"each check: {tmp_path}" in said
    assert "NCCL 2.30 or later" in said
    assert "LD_PRELOAD=" in said
    assert "what `wire` found" in said
    assert "NCCL" not in gpu.needs(gpu.chosen("kernels"), tmp_path)


def test_tests_that_are_skipped_say_why_and_run_in_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "SKIPPED [40] tests/cuda/test_nccl_ranks.py:45: NCCL before 2.30 is old\n40 skipped in 3.21s\n"
    answer = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(gpu_suites.subprocess, "run", lambda *_, **__: answer)
    found = gpu_suites.FIRST.run(Setting(gpu.CUDA))
    assert found["skipped"] == "NCCL before 2.30 is old"
    row = {"check": gpu_suites.FIRST.name, "device": "a GPU", "found": found}
    assert gpu.told(row) == "skipped ranks: four of NCCL: NCCL before 2.30 is old"
    record = tmp_path / "record"
    gpu.append(record, json.dumps(row))
    assert gpu.recorded(record, "a GPU") == {}
    answer.stdout = "3 passed, 1 skipped in 3.21s\n"
    earlier = Setting(gpu.CUDA, found={gpu_suites.FIRST.name: found})
    assert [each["met"] for each in gpu_suites.on_one_gpu(earlier)["verdicts"]] == [True]


def test_a_process_whose_check_fails_is_ended() -> None:
    worker = gpu.Worker(CPU)
    row = worker.run(check("none of this name"), 60, {})
    assert "ValueError: not enough values" in row["error"]
    assert not worker.begun


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    with gpu.world_of_one(CPU):
        yield Setting(CPU)


SMALL = [
    gpu_steps.FIRST_STEPS[1],
    gpu_kernels.FIRST,
    *gpu_kernels.CHECKS[1:5],
    gpu_steps.WIRE,
    *gpu_profile.CHECKS[:2],
    gpu_replicas.CHECKS[0],
]
"""One of each kind; of `wire` a CPU has no rates to find."""


@for_each("name", [each.name for each in SMALL])
def test_a_check_works_on_a_cpu(name: str, setting: Setting) -> None:
    json.dumps(gpu.run(gpu.named(name), setting))
