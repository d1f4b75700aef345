"""The chart of planned messages, one lane for each."""

from dataclasses import replace

import pytest
from sample_records import WHOLE
from sample_timelines import planned, run
from unpacked import figures_of

from tacit.timelines import Timeline
from tacit_lab import reports
from tacit_lab.reports.charts.figures import Chart, Figure, Style
from tacit_lab.reports.charts.planned_messages import LANES, STEPS, lanes_chart

PAINT = {"it": Style("--c0")}


def chart_of(timelines: list[Timeline]) -> Chart:
    chart = lanes_chart(timelines, PAINT, 0)
    assert chart is not None
    return chart


def traces(timelines: list[Timeline]) -> dict[str, Figure]:
    return {trace["name"]: trace for trace in chart_of(timelines).figure["data"]}


def test_what_the_next_forward_pass_needs_first_is_at_the_top() -> None:
    axis = chart_of(planned("it")).figure["layout"]["yaxis"]
    assert axis["ticktext"][:3] == ["training", "1  …r.layer0.weight +2", "2  …r.layer1.weight +2"]
    bottom, top = axis["range"]
    heights = axis["tickvals"]
    assert top < heights[0] < heights[1] < heights[-1] < bottom
    assert heights == sorted(heights)


def test_each_message_is_ready_then_under_way_and_waited_for() -> None:
    found = traces(planned("it"))
    assert list(found) == ["computing", "waiting", "ready", "under way", "waited for"]
    # Those of the step before come in the first one.
    assert len(found["ready"]["x"]) == len(found["under way"]["x"]) == (STEPS + 1) * 8
    assert set(found["ready"]["x"]) == {0.005}
    assert sorted(set(found["under way"]["x"])) == [0.01, 0.03]
    assert len(found["waited for"]["x"]) == STEPS + 1
    ends = zip(found["ready"]["base"], found["ready"]["x"], found["under way"]["base"], strict=True)
    assert all(begun + lasted == pytest.approx(left) for begun, lasted, left in ends)
    assert found["waited for"]["y"][0] == chart_of(planned("it")).figure["layout"]["yaxis"]["tickvals"][1]
    assert found["waited for"]["customdata"][1] == (
        "encoder.layer0.weight and 2 more, of step 19, 4.0 kB, training waits for it"
    )


def test_steps_begin_at_dotted_lines_the_first_at_the_edge() -> None:
    chart = chart_of(planned("it"))
    assert chart.note == "Steps 19 to 21 of rank 0; each begins at a dotted line."
    assert [line["x0"] for line in chart.figure["layout"]["shapes"]] == pytest.approx([0, 0.1, 0.2])
    assert chart.figure["layout"]["xaxis"]["range"] == [0, 0.3]


def test_of_many_messages_the_first_are_drawn_and_that_is_said() -> None:
    chart = chart_of(planned("it", lanes=LANES + 8))
    assert len(chart.figure["layout"]["yaxis"]["ticktext"]) == 1 + LANES
    assert "8 more messages, which are needed later, are not drawn" in chart.note


def test_there_is_no_chart_without_messages() -> None:
    assert lanes_chart(run("it"), PAINT, 0) is None
    assert lanes_chart([], PAINT, 0) is None
    far = [replace(each, messages=each.messages[:3]) for each in planned("it")]  # of another part of the run
    assert lanes_chart(far, PAINT, 0) is None


def test_the_page_has_a_section_for_them_only_where_there_are_any() -> None:
    title = "<h2>Which message had its turn when</h2>"
    assert title not in reports.page(WHOLE, run("ddp"))
    assert title in reports.page(WHOLE, planned("ddp"))


def test_names_of_parameters_are_escaped() -> None:
    evil = "</script><b>"
    told = [
        replace(each, messages=tuple(m._replace(name=evil) for m in each.messages)) for each in planned("ddp")
    ]
    text = reports.page(WHOLE, told)
    assert evil not in text
    lanes = figures_of(text)["lanes-0"]
    assert lanes["layout"]["yaxis"]["ticktext"][1] == "1  &lt;/script&gt;&lt;b&gt;"
