"""The charts of what the ranks did when, and of what the schedules chose."""

from dataclasses import replace
from itertools import pairwise

import pytest
from sample_records import ALONE, DDP, HEAD, TOPK, WHOLE, comparison
from sample_timelines import run, scheduled, untold
from unpacked import figures_of, unpacked

from tacit.timelines import Change, Exchange, Span, Step, Timeline
from tacit_lab import records, reports
from tacit_lab.reports.charts.figures import Chart, Figure, Style
from tacit_lab.reports.charts.schedule import schedule_chart
from tacit_lab.reports.charts.spans import on_one_scale
from tacit_lab.reports.charts.timeline import timeline_chart
from tacit_lab.reports.charts.window import LEAST, MOST, RANKS, cut

PAINT = {"it": Style("--c0")}
EPOCHS = [
    records.EpochRecord(
        algorithm="it", epoch=i, step=10 * i, seconds=i, loss=1.0, accuracy=0.5, bytes_between_nodes=None
    )
    for i in (1, 2, 3, 4)
]


def chart_of(timelines: list[Timeline], alone: float | None = None) -> Chart:
    chart = timeline_chart(timelines, PAINT, 0, alone)
    assert chart is not None
    return chart


def traces(timelines: list[Timeline]) -> dict[str, Figure]:
    return {trace["name"]: trace for trace in chart_of(timelines).figure["data"]}


def test_the_window_is_of_the_middle_and_has_a_round_of_each_level() -> None:
    window = cut(run("it"))
    assert window is not None
    # A period of 8 steps and 6 more.
    assert (window.first, window.last, window.ranks) == (13, 26, 4)
    for each in window.timelines:
        assert [step.step for step in each.steps] == list(range(13, 27))
        assert {exchange.level for exchange in each.exchanges} == {0, 1}
    assert min(step.begun for each in window.timelines for step in each.steps) == 0


def test_a_window_holds_no_evaluation_if_it_can() -> None:
    origin, epochs = 1000.0, (0, 2.01, 4.01)  # evaluations before steps 20 and 40
    window = cut([each.resumed([origin + at + each.rank / 1000 for at in epochs]) for each in run("it")])
    assert window is not None
    assert (window.first, window.last) == (6, 19)
    short = [each.resumed([origin + i + 0.01 for i in range(4)]) for each in run("it")]  # epochs of ten steps
    found = cut(short)
    assert found is not None
    assert found.last - found.first == 13


def test_a_window_has_a_round_however_rare_they_are() -> None:
    """The middle would have none."""
    rare = [
        replace(each, exchanges=tuple(e for e in each.exchanges if e.level == 0 or e.step == 39))
        for each in run("it")
    ]
    window = cut(rare)
    assert window is not None
    assert window.last == 39
    assert window.last - window.first + 1 == LEAST


def test_waiting_between_steps_is_drawn_too() -> None:
    (timeline,) = run("it", ranks=1)
    steps = tuple(s if s.step < 20 else Step(s.step, s.begun + 1, s.ended + 1) for s in timeline.steps)
    flush = Exchange(1, 19, 9, 1.98, 2.5, 8, False, (Span(2.0, 2.5),))
    found = traces([replace(timeline, steps=steps, exchanges=(flush,))])
    (waiting,) = found["waiting"]["x"]
    assert waiting == 0.5
    assert found["waiting"]["customdata"] == ["rank 0, waiting for far, between two steps"]


def test_a_window_stays_within_what_is_known_and_small() -> None:
    short = [each.within(0, 3) for each in run("it")]
    window = cut(short)
    assert window is not None
    assert (window.first, window.last) == (0, 2)
    many = cut(run("it", ranks=50))
    assert many is not None
    assert [each.rank for each in many.timelines] == [0, 7, 14, 21, 28, 35, 42, 49]
    assert len(many.timelines) == RANKS
    assert LEAST <= many.last - many.first + 1 <= MOST
    assert cut([]) is None
    assert cut([each.within(99, 100) for each in run("it")]) is None


def test_computing_and_waiting_fill_every_step() -> None:
    found = traces(run("it"))
    assert list(found) == ["computing", "waiting", "hidden", "exposed"]
    total = {name: sum(trace["x"]) / 4 for name, trace in found.items()}
    assert total["waiting"] == total["exposed"] == pytest.approx(14 * 0.02 + 2 * 0.03)
    assert total["computing"] + total["waiting"] == pytest.approx(14 * 0.1)
    assert total["hidden"] == pytest.approx(14 * 0.02)


def test_bars_of_a_rank_lie_below_each_other_and_within_the_chart() -> None:
    chart = chart_of(run("it"))
    rows = {
        (y, width)
        for trace in chart.figure["data"]
        for y, width in zip(trace["y"], trace["width"], strict=True)
    }
    ends = [(y - width / 2, y + width / 2) for y, width in sorted(rows)]
    assert len(ends) == 4 * 3
    assert all(above[1] <= below[0] for above, below in pairwise(ends))
    bottom, top = chart.figure["layout"]["yaxis"]["range"]
    assert top <= ends[0][0]
    assert ends[-1][1] <= bottom


def test_a_bar_says_what_it_is() -> None:
    found = traces(run("it"))
    assert found["waiting"]["customdata"][0] == "rank 0, step 13: waiting for near"
    assert found["exposed"]["customdata"][-1] == "rank 3, far round 2 of step 23, exposed: 90.0 kB"


def test_of_plain_ddp_whole_steps_are_drawn_and_that_is_said() -> None:
    chart = chart_of(untold("it"))
    (steps,) = chart.figure["data"]
    assert steps["name"] == "steps"
    assert len(steps["x"]) == 4 * LEAST
    assert "does not say when training waits" in chart.note


def test_of_plain_ddp_what_a_step_takes_beyond_computing_is_drawn_as_waiting() -> None:
    chart = chart_of(untold("it"), alone=0.03)
    computing, waiting = chart.figure["data"]
    assert (computing["name"], waiting["name"]) == ("computing", "waiting")
    assert set(computing["x"]) == {0.03}
    assert set(waiting["x"]) == {0.07}
    assert "pattern" in waiting["marker"]
    assert "beyond 30.0 ms, a step without exchange, is drawn as waiting" in chart.note
    (faster,) = chart_of(untold("it"), alone=0.2).figure["data"]
    assert (faster["name"], set(faster["x"])) == ("computing", {0.1})


def test_an_evaluation_has_its_name_where_it_is_no_waiting() -> None:
    (timeline,) = run("it", ranks=1)
    steps = tuple(s if s.step < 20 else Step(s.step, s.begun + 1, s.ended + 1) for s in timeline.steps)
    flush = Exchange(1, 19, 9, 1.98, 2.5, 8, False, (Span(2.0, 2.5),))
    found = traces([replace(timeline, steps=steps, exchanges=(flush,)).within(17, 23)])["evaluating"]
    assert (found["base"], found["x"]) == ([0.8], [0.5])
    assert found["text"] == "eval"
    assert "evaluating" not in traces(run("it"))


def test_timelines_have_one_scale_or_say_how_many_times_they_are_magnified() -> None:
    slow = [
        replace(each, steps=tuple(s._replace(begun=9.5 * s.begun, ended=9.5 * s.ended) for s in each.steps))
        for each in untold("it")
    ]
    drawn = [chart_of(slow), chart_of([each.within(0, 3) for each in slow]), chart_of(untold("it"))]
    layouts = [chart.figure["layout"] for chart in on_one_scale(drawn)]
    ends = [layout["xaxis"]["range"][1] for layout in layouts]
    assert ends[0] == pytest.approx(6 * 0.95 + 9.5 * 0.003)
    assert ends[1:] == pytest.approx([ends[0], ends[0] / 9], abs=1e-4)
    marks = [[each["text"] for each in layout.get("annotations", [])] for layout in layouts]
    assert marks == [[], [], ["<b>9 × magnified</b>"]]


# ---- schedules ----------------------------------------------------------------------------------------


def chosen(*changes: Change) -> Figure | None:
    chart = schedule_chart(scheduled("it", *changes)[0], EPOCHS, PAINT, 0)
    return chart and chart.figure


def test_a_schedule_is_drawn_in_steps_over_the_epochs() -> None:
    figure = chosen(Change(1, 0, {"period": 8.0}), Change(1, 15, {"period": 4.0}))
    assert figure is not None
    (trace,) = figure["data"]
    assert trace["x"] == [0, 1.5, 1.5, 4]
    assert trace["y"] == [8, 8, 4, 4]
    assert figure["layout"]["xaxis"]["range"] == [0, 4]


def test_phases_are_bands_behind_the_curves_of_all_that_changes() -> None:
    figure = chosen(
        Change(1, 0, {"period": 4.0, "delay": 1.0, "local": 1.0, "phase": 0.0}),
        Change(1, 10, {"period": 4.0, "delay": 1.0, "local": 1.0, "phase": 1.0}),
        Change(1, 20, {"period": 2.0, "delay": 1.0, "local": 1.0, "phase": 1.0}),
        Change(1, 30, {"period": 2.0, "delay": 1.0, "local": 1.0, "phase": 2.0}),
    )
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == ["period B", "delay W", "local L"]
    names = [(each["text"], each["x"]) for each in figure["layout"]["annotations"]]
    assert names == [("warm-up", 0.5), ("cycling", 2.0), ("cool-down", 3.5)]
    assert [(each["x0"], each["x1"]) for each in figure["layout"]["shapes"]] == [(0, 1), (3, 4)]


def test_lines_that_would_hide_each_other_are_drawn_apart() -> None:
    figure = chosen(
        Change(1, 0, {"period": 8.0, "delay": 2.0, "local": 2.0}),
        Change(1, 20, {"period": 4.0, "delay": 2.0, "local": 1.0}),
    )
    assert figure is not None
    period, delay, local = figure["data"]
    assert period["y"] == [8, 8, 4, 4]
    assert delay["y"] == [2, 2]
    assert all(1.5 < y < 2 for y in local["y"][:2])
    assert local["customdata"][0] == "local L: 2<br>steps 0 to 19"


def test_what_never_changed_or_is_not_to_be_drawn_is_no_chart() -> None:
    assert chosen() is None
    assert chosen(Change(1, 0, {"period": 8.0})) is None
    assert chosen(Change(1, 0, {"phase": 0.0}), Change(1, 10, {"phase": 1.0})) is None
    assert schedule_chart(scheduled("other", Change(1, 0, {}), Change(1, 5, {}))[0], EPOCHS, PAINT, 0) is None


# ---- on the page --------------------------------------------------------------------------------------


def test_the_page_has_a_section_for_them_only_where_something_is_known() -> None:
    without, known = reports.page(WHOLE), reports.page(WHOLE, [*untold("ddp"), *run("topk:ratio=0.01")])
    for title in ("What the ranks were doing", "What the schedules chose"):
        assert f"<h2>{title}</h2>" not in without
    assert "<h2>What the ranks were doing</h2>" in known
    assert "<h2>What the schedules chose</h2>" not in known
    assert known.count('<figure class="timeline ') == 2


def test_timelines_of_other_algorithms_are_left_out() -> None:
    assert '<figure class="timeline ' not in reports.page(WHOLE, run("another"))


def test_a_page_of_many_algorithms_stays_small() -> None:
    names = [f"topk:ratio=0.{i}" for i in range(1, 11)]
    found = comparison(DDP, *(replace(TOPK, algorithm=name) for name in names), ALONE, head=HEAD)
    timelines = [each for name in names for each in run(name, ranks=16)]
    assert len(reports.page(found, timelines).encode()) < 1_000_000


def test_everything_from_the_timelines_is_escaped() -> None:
    evil = "</script><b>"
    named = [replace(each, levels=(evil, evil)) for each in run("ddp")]
    text = reports.page(WHOLE, named)
    assert evil not in unpacked(text)
    figures = figures_of(text)
    assert "&lt;/script&gt;&lt;b&gt;" in figures["timeline-0"]["data"][1]["customdata"][0]
