"""Bars from one time to another, which charts of what ranks did are made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tacit.timelines import Span
from tacit_lab.reports.charts.figures import Figure

FAINT = 0.45
"""How much of the algorithm's colour has what is hidden."""


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


def span_trace(name: str, bars: Sequence[SpanBar], marker: Figure, scale: float) -> Figure:
    """These bars as a trace of plotly; `scale`: 1 where the axis has seconds, 1000 for milliseconds."""
    digits = 2 if scale > 1 else 4
    unit = "ms" if scale > 1 else "s"
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [bar.y for bar in bars],
        "width": [bar.height for bar in bars],
        "base": [round(bar.span.begun * scale, digits) for bar in bars],
        "x": [round((bar.span.ended - bar.span.begun) * scale, digits) for bar in bars],
        "customdata": [escape(bar.told) for bar in bars],
        "marker": marker,
        "hovertemplate": f"%{{customdata}}<br>%{{x}} {unit}<extra></extra>",
    }
