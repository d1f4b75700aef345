"""The page's sections of charts, each with what is needed to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tacit.timelines import Timeline
from tacit_lab.records import Record
from tacit_lab.reports.charts.curves import charts
from tacit_lab.reports.charts.figures import Chart, Style, styles
from tacit_lab.reports.charts.planned_messages import lanes_chart
from tacit_lab.reports.charts.schedule import schedule_chart
from tacit_lab.reports.charts.timeline import timeline_chart
from tacit_lab.reports.comparison import Comparison

NO_SCRIPT = "The charts need JavaScript. The table and the text do not."
MARKS = {
    "solid": "computing",
    "stripes": "waiting for an exchange: nothing hid it",
    "faint": "an exchange that computing hid",
}

LANE_MARKS = {
    "line": "ready, and waiting for its turn",
    "solid": "under way",
    "stripes": "training waits for it",
}
DID = """A few steps from the middle of each run, rank by rank, by one clock.
The upper bar is training, the lower ones are exchanges. More steps are in <code>traces</code>, to open in
ui.perfetto.dev or chrome://tracing."""
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
    did = [timeline_chart(run, paint, i) for i, run in enumerate(runs)]
    planned = [lanes_chart(run, paint, i) for i, run in enumerate(runs)]
    found = [
        section("How training went", _key(comparison, paint), went),
        section("What the schedules chose", "", [chart for chart in chosen if chart]),
        section("What the ranks were doing", _marks(DID, MARKS), [chart for chart in did if chart]),
        section("Which message had its turn when", _marks(LANES, LANE_MARKS), [c for c in planned if c]),
    ]
    return [each for each in found if each[1]]


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
