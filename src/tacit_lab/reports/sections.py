"""The page's sections of charts, each with what is needed to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tacit.timelines import Timeline
from tacit_lab.records import COMPUTE_ONLY, EpochRecord, Record
from tacit_lab.reports.charts.churn import churn_charts
from tacit_lab.reports.charts.curves import charts
from tacit_lab.reports.charts.figures import Chart, Style, styles
from tacit_lab.reports.charts.planned_messages import lanes_chart
from tacit_lab.reports.charts.schedule import schedule_chart
from tacit_lab.reports.charts.spans import on_one_scale
from tacit_lab.reports.charts.timeline import timeline_chart
from tacit_lab.reports.comparison import Comparison

NO_SCRIPT = "The charts need JavaScript. The table and the text do not."
MARKS = {
    "computing": ("solid", "computing"),
    "waiting": ("stripes", "waiting for an exchange: nothing hid it"),
    "hidden": ("faint", "an exchange that computing hid"),
    "steps": ("hollow", "a whole step, in which torch does not say when it waits"),
    "evaluating": ("gap", "evaluation, between two epochs"),
}
"""Of each trace of a timeline: how its bars look, and what they mean."""

LANE_MARKS = {
    "line": "ready, and waiting for its turn",
    "solid": "under way",
    "stripes": "training waits for it",
}
DID = """A few steps from the middle of each run, rank by rank, by one clock. All have one scale of time, but
where a mark says how many times it is magnified. The upper bar is training, the lower ones are exchanges.
More steps are in <code>traces</code>, to open in ui.perfetto.dev or chrome://tracing."""
LANES = """Below training's bar each planned message has a separate lane, named by a parameter of it: what the
next forward pass needs first is at the top, and what backward has first is mostly at the bottom. With
<code>priority</code> a message may come as late as in the next step, where the forward pass waits for it.
"""

Section = tuple[str, Sequence[Chart]]
"""HTML, and the charts that belong into it."""


def sections(
    comparison: Comparison, records: Sequence[Record], timelines: Iterable[Timeline]
) -> list[Section]:
    """All sections for which there are numbers."""
    paint = styles(comparison)
    by_algorithm: dict[str, dict[int, Timeline]] = {row.algorithm: {} for row in comparison.rows}
    for each in timelines:
        if each.algorithm in by_algorithm:
            by_algorithm[each.algorithm][each.rank] = each
    runs = [[*ranks.values()] for ranks in by_algorithm.values() if ranks]
    went = charts(comparison, records)
    chosen = [schedule_chart(run[0], records, paint, i) for i, run in enumerate(runs)]
    alone = _step_alone(comparison, records)
    did = on_one_scale(_known(timeline_chart(run, paint, i, alone) for i, run in enumerate(runs)))
    planned = on_one_scale(_known(lanes_chart(run, paint, i) for i, run in enumerate(runs)))
    drawn = {trace["name"] for chart in did for trace in chart.figure["data"]}
    marks = dict(mark for name, mark in MARKS.items() if name in drawn)
    found = [
        section("How training went", _key(comparison, paint), went),
        section("Replicas that come and go", "", churn_charts(records, paint)),
        section("What the schedules chose", "", _known(chosen)),
        section("What the ranks were doing", _marks(DID, marks), did),
        section("Which message had its turn when", _marks(LANES, LANE_MARKS), planned),
    ]
    return [each for each in found if each[1]]


def _known(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart]


def _step_alone(comparison: Comparison, records: Sequence[Record]) -> float | None:
    """Seconds of a step without communication; None if no such run came to its end."""
    steps = [r.step for r in records if isinstance(r, EpochRecord) and r.algorithm == COMPUTE_ONLY]
    seconds = comparison.compute_only_seconds
    return seconds / max(steps) if steps and seconds is not None else None


def swatch(style: Style) -> str:
    """The colour of an algorithm, and its dashes."""
    return f'<i class="{style.dash}" style="color: var({style.colour})"></i>'


def section(title: str, key: str, found: Sequence[Chart]) -> Section:
    """A heading, what is needed to read the charts, and a box for each of them."""
    boxes = "\n".join(_box(chart) for chart in found)
    html = f"""<section aria-label="{escape(title)}">
<h2>{escape(title)}</h2>
<noscript><p class="notice">{NO_SCRIPT}</p></noscript>
{key}
<div class="charts">
{boxes}
</div>
</section>"""
    return html, found


def _key(comparison: Comparison, paint: Mapping[str, Style]) -> str:
    names = [row.algorithm for row in comparison.rows]
    items = "\n".join(f"<li>{swatch(paint[name])}{escape(name)}</li>" for name in names)
    return f'<ul class="key">\n{items}\n</ul>'


def _marks(said: str, marks: Mapping[str, str]) -> str:
    """What the charts of a section show, and what each kind of bar means."""
    items = "\n".join(f'<li><i class="{kind}"></i>{escape(meant)}</li>' for kind, meant in marks.items())
    return f"""<p class="asked">{said}</p>
<ul class="marks">
{items}
</ul>"""


def _box(chart: Chart) -> str:
    height = chart.figure["layout"].get("height", 320)
    kind = chart.key.partition("-")[0]
    return f"""<figure class="{escape(kind)} {escape(chart.key)}">
<figcaption><strong>{escape(chart.title)}</strong> {escape(chart.note)}</figcaption>
<div class="plot" id="{escape(chart.key)}" style="height: {height}px"></div>
</figure>"""
