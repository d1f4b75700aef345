"""What doors.py makes of what its launches tell: the rates it chooses, its pairs and intervals."""

import json
from pathlib import Path
from typing import Any

import pytest

import doors
from kept import StateSlice


class Told(doors.Launches):
    """Losses that are known: the arm's, better by 0.1 where the rate is the middle one, and by the seed."""

    def __init__(self, path: Path) -> None:
        super().__init__(StateSlice(path))
        self.asked: list[tuple[object, ...]] = []

    def told(self, cluster: str, *words: object) -> Any:
        self.asked.append(words)
        _, arm, seed, rate, _ = words
        base = {"ddp": 2.0, "int4": 2.02, "diloco": 2.1, "localsgd": 2.05}[str(arm)]
        diverged = arm == "diloco" and rate == 2e-3
        return {"loss": None if diverged else (base - 0.1 * (rate == 1e-3)) * (1 + float(str(seed)) / 100)}


def test_each_arm_has_its_best_rate_and_is_paired_by_seed(tmp_path: Path) -> None:
    launches = Told(tmp_path / "rows")
    rows = doors.trained(launches, (0, 1, 2), (5e-4, 1e-3, 2e-3), 300)
    assert [row["arm"] for row in rows] == list(doors.TRAINED)
    assert {row["rate"] for row in rows} == {1e-3}
    assert rows[0]["gap_percent"] == 0
    assert rows[2]["gap_percent"] == pytest.approx(100 * (2.0 / 1.9 - 1))
    assert rows[2]["gap_half"] == pytest.approx(0, abs=1e-9)
    chosen = {words[2] for words in launches.asked if words[3] != 1e-3}
    assert chosen == {doors.CHOOSING}, "rates are judged by a seed that is not counted"
    assert {words[1] for words in launches.asked if words[3] != 1e-3} == {"ddp", "diloco"}
    assert rows[2]["tried"][2e-3] == float("inf"), "a loss that is not finite is no best"


def test_an_interval_of_three() -> None:
    found = doors.interval([1.0, 2.0, 3.0])
    assert found["gap_percent"] == 2.0
    assert found["gap_half"] == pytest.approx(4.302653 / 3**0.5)
    assert doors.interval([1.0])["gap_half"] is None


def test_a_launch_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def launched(cluster: str, words: list[str], timeout: float) -> dict[str, float]:
        calls.append(words)
        return {"loss": 1.0}

    monkeypatch.setattr(doors, "in_testbed", launched)
    file = tmp_path / "rows"
    for _ in range(2):
        assert doors.Launches(StateSlice(file)).told("2x2", "loss", "ddp", 0, 1e-3, 300) == {"loss": 1.0}
    assert len(calls) == 1
    assert json.loads(file.read_text())["words"] == ["loss", "ddp", "0", "0.001", "300"]


def test_the_tables_say_what_was_measured() -> None:
    ratio = {"median": 12.0, "q1": 11.0, "q3": 13.0}
    result = {
        "time": [
            {"arm": "diloco", "step_ms": 500.0, "speedup_over_ddp": ratio, "of_near_only": ratio,
             "mb_per_step_and_node": 0.5}
        ],
        "loss": [{"arm": "ddp", "rate": 1e-3, "losses": [2.0], **doors.interval([0.0])}],
    }  # fmt: skip
    assert doors.as_text(result).splitlines() == [
        "| arm | ms a step | times as fast as ddp | of near-only | MB a step and node |",
        "| --- | --- | --- | --- | --- |",
        "| diloco | 500 | 12.00 (11.00 to 13.00) | 12.00 (11.00 to 13.00) | 0.50 |",
        "",
        "| arm | rate | losses | above ddp, % |",
        "| --- | --- | --- | --- |",
        "| ddp | 0.001 | 2.000 | +0.00 |",
    ]
