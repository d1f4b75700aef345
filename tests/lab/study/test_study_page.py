"""The page of a study, and its Pareto front."""

from typing import Any

from unpacked import figures_of, unpacked

from tacit_lab.study.page import front, page


def row(arm: str, bytes_: float, gap: float, steps: int = 100) -> dict[str, Any]:
    interval = {"mean": gap, "half": 0.01, "count": 3}
    accuracy = {"mean": 0.9 + gap, "half": None, "count": 3}
    about = {"by_loss": False, "on_cluster": False, "seconds": 1.0}
    return {
        **about,
        "arm": arm,
        "steps": steps,
        "bytes": bytes_,
        "gap": interval,
        "accuracy": accuracy,
        "rate": 0.5,
    }


def test_the_front_is_what_nothing_else_beats_in_both() -> None:
    rows = [row("a", 0.5, -0.01), row("b", 0.1, -0.02), row("c", 0.1, -0.03), row("d", 0.05, -0.5)]
    assert [each["arm"] for each in front([*rows, row("worse", 0.6, -0.1)])] == ["d", "b", "a"]


def test_the_page_has_a_table_for_each_length_and_the_charts() -> None:
    rows = [
        row(arm, share, gap, steps)
        for steps in (100, 200)
        for arm, share, gap in (("dense", 1.0, 0.0), ("topk", 0.03, -0.02), ("a<b", 0.2, -0.05))
    ]
    text = unpacked(page("digits", rows, "dense"))
    assert text.index("200 steps</h2>") < text.index("100 steps</h2>")
    assert "a&lt;b" in text
    assert "-2.00 ±1.00" in text
    assert "x0.5" in text
    assert [*figures_of(page("digits", rows, "dense"))] == ["gap-steps", "front-bytes-100", "front-bytes-200"]


def test_of_one_length_there_is_no_chart_against_steps() -> None:
    found = figures_of(page("digits", [row("dense", 1.0, 0.0), row("topk", 0.03, -0.02)], "dense"))
    assert [*found] == ["front-bytes-100"]
    line, topk = found["front-bytes-100"]["data"]
    assert (line["x"], topk["y"]) == ([3.0], [-2.0])


def test_a_script_has_a_front_of_time_too_and_may_be_judged_by_its_loss() -> None:
    rows = [
        {**row(arm, share, gap), "by_loss": True, "on_cluster": True, "seconds": seconds}
        for arm, share, gap, seconds in (("dense", 1.0, 0.0, 9.0), ("topk", 0.03, -0.5, 2.0))
    ]
    rows[1]["bytes"] = None
    text = page("train.py", rows, "dense")
    assert [*figures_of(text)] == ["front-seconds-100"]
    assert figures_of(text)["front-seconds-100"]["data"][1]["y"] == [-0.5]
    assert "-0.5000 ±0.0100" in unpacked(text)
