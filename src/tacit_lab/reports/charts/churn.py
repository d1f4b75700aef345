"""Charts of runs whose replicas come and go: how many take part, rounds, samples a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tacit_lab.records import CHOOSING, ChurnRecord, Record
from tacit_lab.reports.charts.figures import Chart, Figure, Style, tint

MARKS = {"killed": ("x", 0.7), "frozen": ("square-open", 0.7), "back": ("circle-open", 0.3)}
"""Of what is done to a replica: plotly's name of its mark, and how far above the largest number it stands."""


def churn_charts(records: Sequence[Record], paint: Mapping[str, Style]) -> list[Chart]:
    """The members of each algorithm's run, of its first seed; then rounds and samples a second of all."""
    runs: dict[str, ChurnRecord] = {}
    for each in records:
        if isinstance(each, ChurnRecord) and each.seed != CHOOSING and each.algorithm in paint:
            first = runs.setdefault(each.algorithm, each)
            runs[each.algorithm] = each if each.seed == first.seed else first
    if not runs:
        return []
    rounds = {name: (run.rounds, "hv") for name, run in runs.items()}
    rates = {name: (run.samples, "vh") for name, run in runs.items()}
    return [
        *(_members(run, paint, i) for i, run in enumerate(runs.values())),
        _lines("churn-rounds", "Rounds", "Flat where all wait for a new period.", "rounds", rounds, paint),
        _lines("churn-rate", "Samples a second", "Of all members.", "samples / s", rates, paint),
    ]


def _members(run: ChurnRecord, paint: Mapping[str, Style], place: int) -> Chart:
    end = max((points[-1][0] for points in (run.samples, run.rounds, run.members) if points), default=0.0)
    line = _line(run.algorithm, [*run.members, [end, run.members[-1][1]]] if run.members else [], "hv", paint)
    marks = [_marks(run, what, symbol, above) for what, (symbol, above) in MARKS.items()]
    marks = [each for each in marks if each["x"]]  # the page labels each line at its end
    most = max((count for _, count in run.members), default=1)
    layout: Figure = {
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "members"}, "range": [0, most + 1], "dtick": max(1, round(most / 6))},
    }
    return Chart(
        key=f"churn-members-{place}",
        title=run.algorithm,
        note="Members of the period. ×: a replica was killed, □: frozen, ○: back again.",
        figure={"data": [line, *marks], "layout": layout},
    )


def _marks(run: ChurnRecord, what: str, symbol: str, above: float) -> Figure:
    went = [(at, node) for at, node, how in run.went if how == what]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": what,
        "x": [at for at, _ in went],
        "y": [max((n for _, n in run.members), default=1) + above for _ in went],
        "customdata": [f"replica {node} {what}, {at:.1f} s" for at, node in went],
        "marker": {"symbol": symbol, "size": 9, "color": "var(--ink)"},
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _lines(
    key: str,
    title: str,
    note: str,
    unit: str,
    curves: Mapping[str, tuple[Sequence[Sequence[float]], str]],
    paint: Mapping[str, Style],
) -> Chart:
    layout: Figure = {
        "xaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    traces = [_line(name, points, shape, paint) for name, (points, shape) in curves.items()]
    return Chart(key=key, title=title, note=note, figure={"data": traces, "layout": layout})


def _line(
    algorithm: str, points: Sequence[Sequence[float]], shape: str, paint: Mapping[str, Style]
) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(algorithm),
        "x": [at for at, _ in points],
        "y": [value for _, value in points],
        "line": {
            "color": tint(algorithm, paint),
            "width": 2.5,
            "shape": shape,
            "dash": paint[algorithm].dash,
        },
        "hovertemplate": f"{escape(algorithm)}<br>%{{y:g}} at %{{x:.1f}} s<extra></extra>",
    }
