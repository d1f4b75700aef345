"""The page's charts: how accuracy and loss moved with seconds and megabytes, and where the seconds went."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import NamedTuple, TypeAlias

from tacit_lab.records import CHOOSING, EpochRecord, Record, RunKey, RunRecord
from tacit_lab.reports.charts.bars import bars
from tacit_lab.reports.charts.figures import Chart, Figure, Style, line_at, styles
from tacit_lab.reports.charts.split import split
from tacit_lab.reports.comparison import Comparison

Reading: TypeAlias = Callable[[EpochRecord], float | None]

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
"""Fewer than colours, so that the two do not begin again together."""
_OF_APART = (
    "How far replicas are from their mean, on average, over the length of the mean. Measured after each "
    "epoch, in the last one just before they are made equal; 0 where they have just met."
)
LOG_FROM = 8.0
"""An axis is logarithmic where its largest value is this many times its smallest."""


@dataclass(frozen=True, kw_only=True)
class _Axis:
    title: str
    reading: Reading
    form: str


SECONDS = _Axis(title="training seconds", reading=lambda epoch: epoch.seconds, form=".1f")
MEGABYTES = _Axis(
    title="MB between nodes",
    reading=lambda epoch: None if epoch.bytes_between_nodes is None else epoch.bytes_between_nodes / 1e6,
    form=".1f",
)
STEPS = _Axis(title="steps", reading=lambda epoch: epoch.step, form="d")
COUNTED = _Axis(
    title="MB by count",
    reading=lambda epoch: None if epoch.bytes_by_count is None else epoch.bytes_by_count / 1e6,
    form=".1f",
)
ACCURACY = _Axis(title="accuracy", reading=lambda epoch: epoch.accuracy, form=".4f")
LOSS = _Axis(title="loss", reading=lambda epoch: epoch.loss, form=".4f")
EPOCHS = _Axis(title="epochs", reading=lambda epoch: epoch.epoch, form="d")
APART = _Axis(title="consensus distance", reading=lambda epoch: epoch.consensus_relative, form=".2e")


def charts(comparison: Comparison, records: Sequence[Record]) -> list[Chart]:
    """All charts for which there are numbers."""
    curves = curves_of(comparison, records)
    paint = styles(comparison)
    costs = (STEPS, COUNTED) if comparison.in_process else (SECONDS, MEGABYTES)
    drawn = [(y, x) for y in (ACCURACY, LOSS) for x in costs]
    if any(epoch.consensus_relative for runs in curves.values() for run in runs for epoch in run):
        drawn.append((APART, EPOCHS))
    found = [_chart(y, x, curves, paint, comparison) for y, x in drawn]
    seed = comparison.seeds[0] if len(comparison.seeds) > 1 else None
    spent = bars(split(records), paint, comparison.compute_only_seconds, seed)
    return [chart for chart in (*found, spent) if chart is not None]


def curves_of(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[list[EpochRecord]]]:
    """What each algorithm's runs have recorded, seed by seed, at the rate that counts."""
    rates = {row.algorithm: row.rate for row in comparison.rows}
    runs: dict[RunKey, list[EpochRecord]] = {}
    for record in records:
        if rates.get(record.algorithm) != record.rate or record.seed == CHOOSING:
            continue
        if isinstance(record, RunRecord):
            runs[record.key] = []
        elif isinstance(record, EpochRecord):
            runs.setdefault(record.key, []).append(record)
    found = {name: [run for key, run in runs.items() if key.algorithm == name and run] for name in rates}
    return {name: each for name, each in found.items() if each}


def _chart(
    y: _Axis,
    x: _Axis,
    curves: Mapping[str, Sequence[Sequence[EpochRecord]]],
    paint: Mapping[str, Style],
    comparison: Comparison,
) -> Chart | None:
    traces, bands = [], []
    each = "epoch" if comparison.epochs else "report"
    for i, (name, runs) in enumerate(curves.items()):
        points = _points(runs, x, y)
        if points:
            traces.append(_trace(name, points, (x, y, each), paint[name], SYMBOLS[i % len(SYMBOLS)]))
            bands.append(_band(points, paint[name]))
    if not traces:
        return None
    several = len(comparison.seeds) > 1
    layout: Figure = {"xaxis": _axis(x, traces, "x"), "yaxis": _axis(y, traces, "y")}
    if y is ACCURACY and comparison.target is not None:
        layout |= line_at("y", comparison.target, f"target {comparison.target:g}")
    note = f"One point for each {each}; {'higher' if y is ACCURACY else 'lower'} and left is better."
    if any(row.churned for row in comparison.rows):
        note += " Under churn there is one, at the end."
    if several:
        note += " Lines are means over the seeds, bands reach from the lowest to the highest of them."
        traces = [*bands, *traces]
    return Chart(
        key=f"{y.title}-{x.title.split()[-1]}".lower().replace(" ", "-"),
        title=f"{y.title.capitalize()} against {x.title}",
        note=_OF_APART if y is APART else note,
        figure={"data": traces, "layout": layout},
    )


class Point(NamedTuple):
    """The means over the seeds after as many epochs, or reports; `low` and `high`: of their y."""

    x: float
    y: float
    low: float
    high: float
    number: int


def points_of(runs: Sequence[Sequence[EpochRecord]], x: str, y: str) -> list[Point]:
    """The same for axes of these titles, such as "training seconds" and "accuracy"."""
    axes = {each.title: each for each in (SECONDS, MEGABYTES, STEPS, COUNTED, ACCURACY, LOSS)}
    return _points(runs, axes[x], axes[y])


def _points(runs: Sequence[Sequence[EpochRecord]], x: _Axis, y: _Axis) -> list[Point]:
    """The points at which every seed has both numbers."""
    found = []
    for epochs in zip(*runs, strict=False):
        xs, ys = [x.reading(each) for each in epochs], [y.reading(each) for each in epochs]
        if all(map(_finite, xs)) and all(map(_finite, ys)):
            known = [each for each in ys if each is not None]
            mean = fmean(each for each in xs if each is not None)
            found.append(Point(mean, fmean(known), min(known), max(known), epochs[0].epoch))
    return found


def _trace(
    name: str, points: Sequence[Point], told_by: tuple[_Axis, _Axis, str], style: Style, symbol: str
) -> Figure:
    colour, (x, y, each) = f"var({style.colour})", told_by
    told = f"{each} %{{customdata}}<br>%{{x:{x.form}}} {x.title}<br>{y.title} %{{y:{y.form}}}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(name),
        "x": [point.x for point in points],
        "y": [point.y for point in points],
        "customdata": [point.number for point in points],
        "line": {"color": colour, "width": 2.5, "dash": style.dash},
        "marker": {"symbol": symbol, "size": 8, "color": colour},
        "hovertemplate": f"<b>{escape(name)}</b><br>{told}<extra></extra>",
    }


def _band(points: Sequence[Point], style: Style) -> Figure:
    xs = [each.x for each in points]
    return {
        "type": "scatter",
        "mode": "none",
        "x": [*xs, *xs[::-1]],
        "y": [*(each.high for each in points), *(each.low for each in points[::-1])],
        "fill": "toself",
        "fillcolor": f"var({style.colour})",
        "opacity": 0.2,
        "hoverinfo": "skip",
    }


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _axis(axis: _Axis, traces: Sequence[Figure], key: str) -> Figure:
    values = [value for trace in traces for value in trace[key]]
    if axis is not ACCURACY and min(values) > 0 and max(values) >= LOG_FROM * min(values):
        ticks = _log_ticks(min(values), max(values))
        texts = [f"{tick:g}" for tick in ticks]
        title = f"{axis.title} (log scale)"
        return {"title": {"text": title}, "type": "log", "tickvals": ticks, "ticktext": texts}
    if axis is EPOCHS:
        whole = {"tick0": 0, "dtick": math.ceil(max(values) / 8), "tickformat": "d"}
        return {"title": {"text": axis.title}, "rangemode": "tozero", **whole}
    return {"title": {"text": axis.title}, "rangemode": "tozero" if key == "x" else "normal"}


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 and so on over the range; only powers of ten where those are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [float(f"{step}e{decade}") for decade in decades for step in steps]
