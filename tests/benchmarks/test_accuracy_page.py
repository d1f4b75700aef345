"""The page of what algorithms cost in accuracy: its tables, its figure, and what `tacit list` tells of it."""

import json
from typing import Any
from xml.etree import ElementTree

import accuracy
import accuracy_page
from paired import RESULTS
from tacit import algorithms
from tacit_lab.algorithm_facts import MeasuredGap, gaps, gaps_of


def row(arm: str, steps: int, gap: float, half: float | None = 0.002, rate: float = 1.0) -> dict[str, Any]:
    return {
        "task": "mnist",
        "arm": arm,
        "steps": steps,
        "rate": rate,
        "bytes": 1.0 if arm == "dense" else 0.05,
        "accuracy": {"mean": 0.98 + gap, "half": half, "count": 3},
        "gap": {"mean": gap, "half": half, "count": 3},
        "loss_gap": 0.0,
        "on": ["AMD EPYC"],
        "dates": ["2026-11-23", "2026-11-30"],
        "stands": True,
    }


ROWS = [
    *(row("dense", steps, 0.0) for steps in (600, 2400)),
    *(row("topk:ratio=0.01,warmup_steps={tenth}", steps, -6 / steps) for steps in (600, 2400)),
    row("dgc", 600, 0.001, None),
]


def test_what_has_two_seeds_is_not_told() -> None:
    few = {**ROWS[0], "gap": {"mean": 0.0, "half": 0.1, "count": 2}}
    assert accuracy_page.enough([*ROWS, few]) == ROWS


def test_a_fact_is_of_the_longest_training() -> None:
    topk, dgc = accuracy_page.facts(ROWS[2:])
    assert (topk["algorithm"], topk["attached"]) == ("topk", "topk:ratio=0.01,warmup_steps=240")
    assert (topk["steps"], topk["gap"]) == (2400, -0.0025)
    assert dgc["half"] is None
    assert MeasuredGap(**topk).seeds == 3


def test_the_page_has_a_table_for_each_length() -> None:
    page = accuracy_page.page(ROWS, [], "dense")
    assert "| `topk:ratio=0.01,warmup_steps=60` | 5.00% | 97.00% | -1.00 ± 0.20 | 3 | 1 |" in page
    assert "| `topk:ratio=0.01,warmup_steps=240` | 5.00% | 97.75% | -0.25 ± 0.20 | 3 | 1 |" in page
    assert "+0.10 (one seed)" in page
    assert page.count("| attached |") == 2
    assert page.index("2,400 steps") < page.index("600 steps"), "the longest first"


def test_what_was_trained_before_a_change_is_marked() -> None:
    assert " † |" not in accuracy_page.page(ROWS, [], "dense")
    for looked in (False, None):
        page = accuracy_page.page([*ROWS[:2], {**ROWS[2], "stands": looked}], [], "dense")
        assert "| `topk:ratio=0.01,warmup_steps=60` † |" in page
        assert accuracy_page.CHANGED in page


def test_what_has_few_trainings_stands_apart() -> None:
    page = accuracy_page.page(ROWS[:4], [row("demo", 600, 0.003, None)], "dense")
    before, apart = page.split("## With few trainings")
    assert "`demo`" not in before
    assert "| `demo` | 5.00% | 98.30% | +0.30 (one seed) | 3 | 1 |" in apart


def test_a_table_says_when_and_on_what_it_was_trained() -> None:
    both = "learning rate. Trained 2026-11-23 to 2026-11-30 on AMD EPYC."
    assert accuracy_page.page(ROWS, [], "dense").count(both) == 2
    moved = [{**each, "on": ["NVIDIA H100"]} if each["steps"] == 2400 else each for each in ROWS]
    page = accuracy_page.page(moved, [], "dense")
    assert page.count("2026-11-30 on NVIDIA H100.") == 1
    assert page.index("on NVIDIA H100") < page.index("600 steps")
    assert "on AMD EPYC and NVIDIA H100." in accuracy_page.page([*moved[:3], ROWS[3], ROWS[4]], [], "dense")


def test_the_fewest_bytes_are_told_where_a_loss_is_excluded() -> None:
    found = [(0.03, -0.001, 0.003), (0.02, 0.004, None), (0.01, 0.002, 0.008), (0.1, 0.0, 0.001)]
    rows = [
        {**ROWS[3], "bytes": share, "gap": {"mean": gap, "half": half, "count": 3}}
        for share, gap, half in found
    ]
    chosen = accuracy_page.safest(rows)
    assert chosen is not None
    assert chosen["bytes"] == 0.03, "not one seed, and not a wide interval, whatever its mean"
    assert "of 4 looked at, are 3.00%: `topk:" in accuracy_page.page([ROWS[1], *rows], [], "dense")
    assert "is excluded for none of these 1." in accuracy_page.page([ROWS[1], rows[2]], [], "dense")


def test_the_figure_has_a_line_for_what_was_trained_for_two_lengths() -> None:
    figure = accuracy_page.figure(ROWS[2:])
    words = [each.text for each in ElementTree.fromstring(figure).iter() if each.text]
    assert words.count("topk:ratio=0.01,warmup_steps=steps/10") == 1
    assert not any("dgc" in word for word in words)
    assert "2,400 steps" in words


def test_what_is_told_is_what_was_measured() -> None:
    """The facts that are committed are those of the trainings that are."""
    done = accuracy.read(RESULTS / accuracy.FILE)
    rows = accuracy.STUDY.rows(done, accuracy.STUDY.there(done), range(len(done)))
    found = [each for each in accuracy_page.enough(rows) if each["arm"] != accuracy.PLAIN]
    told = json.loads(accuracy_page.FACTS.read_text())
    assert told
    assert all(each in accuracy_page.facts(found) for each in told)
    page = accuracy_page.PAGE.read_text()
    assert all(f"`{each['attached']}`" in page for each in told)


def test_each_fact_is_of_an_algorithm_that_there_is() -> None:
    for each in gaps():
        algorithms.parse(each.attached)
        assert each in gaps_of(each.algorithm)
