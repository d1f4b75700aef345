"""What planning.py makes of both: who was held out, how many predictions are good, what is chosen."""

from typing import Any

import pytest

import foresight


def row(arm: str, measured: float, predicted: float, held_out: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model": "vgg11",
        "cluster": "4x1@1gbit",
        "arm": arm,
        "held_out": held_out,
        "measured_ms": measured,
        "predicted_ms": predicted,
        "off": predicted / measured - 1,
        "formula_ms": 2 * measured,
        "predicted_mb": 1.0,
        "interface_mb": 1.0,
        **more,
    }


def test_half_are_held_out_and_none_that_was_looked_at() -> None:
    everything, apart = foresight.configurations(), foresight.held_out()
    assert len(apart) == len(everything) // 2 >= 24
    assert apart == foresight.held_out(), "the seed decides"
    assert apart < {*everything}
    assert not {each[:2] for each in apart} & {*foresight.BUILT_ON}
    assert {each[0] for each in apart} == {*foresight.MODELS}


def test_verdicts_count_what_is_within_the_limits() -> None:
    rows = [row("ddp", 100, 109), row("topk", 100, 85, held_out=True), row("bf16", 100, 130, held_out=True)]
    found = foresight.verdicts(rows)
    assert (found["all"]["within_10"], found["all"]["within_25"]) == (1, 2)
    assert found["all"]["worst"] == pytest.approx(0.3)
    assert (found["held out"]["configurations"], found["held out"]["within_25"]) == (2, 1)
    assert found["all"]["formulas_within_10"] == 0


def test_the_choice_is_by_prediction_and_is_judged_by_measurement() -> None:
    rows = [
        row("ddp", 100, 90),
        row("bf16", 80, 70),
        row("topk", 60, 75),
        row("localsgd:sync_every=8", 50, 40),
    ]
    found = {each["accept"]: each for each in foresight.chosen(rows)}
    assert [*found] == ["rounded", "feedback", "periodic"], "of one candidate nothing is chosen"
    assert (found["feedback"]["choice"], found["feedback"]["best"]) == ("bf16", "topk")
    assert found["feedback"]["over_best"] == pytest.approx(80 / 60 - 1)
    assert found["feedback"]["over_ddp"] == pytest.approx(-0.2)
    assert found["periodic"]["over_best"] == 0
    result = {"rows": rows, "verdicts": foresight.verdicts(rows), "auto": [*found.values()]}
    assert "localsgd:sync_every=8" in foresight.table(result)
