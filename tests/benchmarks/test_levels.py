"""What levels.py says of accuracies comes from the grid's pairs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import levels
from runs import Done, Run


def test_accuracies_are_paired_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(runs: Sequence[Run], path: Path) -> list[Done]:
        return [
            Done(
                run,
                "ok",
                accuracy=0.5 + run.seed / 10 + (run.algorithm == "daso") / 100,
                seconds=4.0 if run.algorithm == "ddp" else 1.0,
                megabytes=1.0,
            )
            for run in runs
        ]

    monkeypatch.setattr(levels, "carry_out", made)
    rows = levels.accuracies(["digits"], 3, "2x2@100mbit")
    assert [row["algorithm"] for row in rows] == list(levels.RIVALS)
    daso = rows[levels.RIVALS.index("daso")]
    assert daso["ddp"] == pytest.approx(0.6)
    assert daso["difference"] == pytest.approx(0.01)
    assert daso["interval"] == pytest.approx(0.0, abs=1e-12)
    assert daso["time_saved"] == pytest.approx(0.75)
    assert "+0.0100 ± 0.0000" in levels.accuracy_table(rows)
