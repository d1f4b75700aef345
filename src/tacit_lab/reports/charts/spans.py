"""Bars from one time to another, of which charts of what ranks did are made, and their axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import NamedTuple

from tacit.timelines import Span
from tacit_lab.reports.charts.figures import Chart, Figure

FAINT = 0.45
"""How much of the algorithm's colour has what is hidden."""
DIGITS = 5
"""Times are drawn to so many decimals of a second."""


class SpanBar(NamedTuple):
    """Where it stands: from above in pixels, from the left in seconds."""

    y: float
    height: float
    span: Span
    told: str


def solid(colour: str) -> Figure:
    """Filled with the colour, with a thin gap to its neighbours."""
    return {"color": colour, "line": {"color": "var(--page)", "width": 0.75}}


def striped(colour: str) -> Figure:
    """Stripes of the colour: waiting."""
    stripes = {"shape": "/", "size": 5, "solidity": 0.3, "fgcolor": colour, "bgcolor": "var(--page)"}
    return {"color": colour, "pattern": stripes, "line": {"color": colour, "width": 1}}


def span_trace(name: str, bars: Sequence[SpanBar], marker: Figure) -> Figure:
    """These bars as a trace of plotly."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [bar.y for bar in bars],
        "width": [bar.height for bar in bars],
        "base": [round(bar.span.begun, DIGITS) for bar in bars],
        "x": [round(bar.span.ended - bar.span.begun, DIGITS) for bar in bars],
        "customdata": [escape(bar.told) for bar in bars],
        "marker": marker,
        "hovertemplate": "%{customdata}<br>%{x:.3~s}s<extra></extra>",
    }


def time_axis(end: float) -> Figure:
    """From 0 to `end` seconds; ticks say "50ms" or "2s"."""
    return {"range": [0, round(end, DIGITS)], "tickformat": "~s", "ticksuffix": "s"}


def on_one_scale(charts: Sequence[Chart]) -> list[Chart]:
    """These charts with one scale of time; a shorter one is magnified so many times, and says so."""
    ends = [chart.figure["layout"]["xaxis"]["range"][1] for chart in charts]
    longest = max(ends, default=0.0)
    return [_magnified(chart, int(longest // end), longest) for chart, end in zip(charts, ends, strict=True)]


def _magnified(chart: Chart, times: int, longest: float) -> Chart:
    layout = chart.figure["layout"]
    wanted = {**layout, "xaxis": time_axis(longest / times)}
    if times > 1:
        mark: Figure = {"text": f"<b>{times} × magnified</b>", "showarrow": False, "xanchor": "right"}
        mark |= {"x": 1, "xref": "x domain", "y": 1, "yref": "y domain", "yanchor": "bottom"}
        mark |= {"bgcolor": "var(--warn-panel)", "font": {"color": "var(--warn)"}}
        wanted["annotations"] = [mark]
    return replace(chart, figure={**chart.figure, "layout": wanted})
