"""What lean.py makes of what its ranks have told."""

from typing import Any

import pytest

import lean


def told(**arms: tuple[float, float, float]) -> dict[str, Any]:
    """Two blocks of each arm: seconds and processor seconds of a step, and megabytes."""
    return {
        "withheld": 0.0,
        "arms": {
            arm: {"seconds": [step, step], "cpu": [cpu, cpu], "bytes": [1e6 * sent, 1e6 * sent]}
            for arm, (step, cpu, sent) in arms.items()
        },
    }


def promises(**arms: tuple[float, float, float]) -> dict[str, dict[str, bool]]:
    """Whether each promise is kept, by arm, where computing takes 400 ms, and 200 of a processor."""
    found = lean.rows("lean-slow", told(**{"compute-only": (0.4, 0.2, 0.0)} | arms))
    return {row["arm"]: {each["what"]: each["met"] for each in row["promises"]} for row in found}


@pytest.mark.parametrize(("step", "met"), [(0.44, True), (0.45, False)])
def test_a_share_is_of_computing(step: float, met: bool) -> None:
    assert promises(dgc=(step, 0.2, 1.0))["dgc"]["of compute-only"] is met


@pytest.mark.parametrize(("cpu", "met"), [(0.2179, True), (0.2181, False)])
def test_processor_time_is_beyond_computings(cpu: float, met: bool) -> None:
    assert promises(topk=(0.4, cpu, 1.0))["topk"]["cpu beyond computing, ms"] is met


@pytest.mark.parametrize(
    ("step", "megabytes", "met"),
    [(0.43, 1.0, True), (0.45, 1.0, False), (1.09, 12.5, True), (1.11, 12.5, False)],
)
def test_no_step_is_shorter_than_computing_or_its_bytes(step: float, megabytes: float, met: bool) -> None:
    assert promises(int8=(step, 0.2, megabytes))["int8"]["of limit"] is met


def test_what_is_missed_is_said() -> None:
    text = lean.table(
        lean.rows("lean-slow", told(**{"compute-only": (0.4, 0.2, 0.0), "dgc": (0.8, 0.3, 1.0)}))
    )
    assert "of compute-only 0.9: 0.500 MISSED; cpu beyond computing, ms 18: 100.000 MISSED" in text


def test_what_is_promised_is_measured() -> None:
    for scene in lean.SCENES.values():
        assert set(scene.promises) <= set(scene.arms)
