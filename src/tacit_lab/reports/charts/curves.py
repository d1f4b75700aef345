"""The page's charts: how accuracy and loss moved with seconds and megabytes, and where the seconds went."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from tacit_lab.records import EpochRecord, Record, RunRecord
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
ACCURACY = _Axis(title="accuracy", reading=lambda epoch: epoch.accuracy, form=".4f")
LOSS = _Axis(title="loss", reading=lambda epoch: epoch.loss, form=".4f")
EPOCHS = _Axis(title="epochs", reading=lambda epoch: epoch.epoch, form="d")
APART = _Axis(title="consensus distance", reading=lambda epoch: epoch.consensus_relative, form=".2e")


def charts(comparison: Comparison, records: Sequence[Record]) -> list[Chart]:
    """All charts for which there are numbers."""
    curves = _curves(comparison, records)
    paint = styles(comparison)
    found = [
        _chart(y, x, curves, paint, comparison.target) for y in (ACCURACY, LOSS) for x in (SECONDS, MEGABYTES)
    ]
    if any(epoch.consensus_relative for each in curves.values() for epoch in each):
        found.append(_chart(APART, EPOCHS, curves, paint, comparison.target))
    spent = bars(split(records), paint, comparison.compute_only_seconds)
    return [chart for chart in (*found, spent) if chart is not None]


def _curves(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[EpochRecord]]:
    curves: dict[str, list[EpochRecord]] = {row.algorithm: [] for row in comparison.rows}
    for record in records:
        if record.algorithm not in curves:
            continue
        if isinstance(record, RunRecord):
            curves[record.algorithm] = []
        elif isinstance(record, EpochRecord):
            curves[record.algorithm].append(record)
    return {name: epochs for name, epochs in curves.items() if epochs}


def _chart(
    y: _Axis, x: _Axis, curves: Mapping[str, list[EpochRecord]], paint: Mapping[str, Style], target: float
) -> Chart | None:
    traces = [
        trace
        for i, (name, epochs) in enumerate(curves.items())
        if (trace := _trace(name, epochs, x, y, paint[name], SYMBOLS[i % len(SYMBOLS)]))
    ]
    if not traces:
        return None
    layout: Figure = {"xaxis": _axis(x, traces, "x"), "yaxis": _axis(y, traces, "y")}
    if y is ACCURACY:
        layout |= line_at("y", target, f"target {target:g}")
    note = f"One point for each epoch; {'higher' if y is ACCURACY else 'lower'} and left is better."
    return Chart(
        key=f"{y.title}-{x.title.split()[-1]}".lower().replace(" ", "-"),
        title=f"{y.title.capitalize()} against {x.title}",
        note=_OF_APART if y is APART else note,
        figure={"data": traces, "layout": layout},
    )


def _trace(name: str, epochs: Sequence[EpochRecord], x: _Axis, y: _Axis, style: Style, symbol: str) -> Figure:
    points = [(x.reading(each), y.reading(each), each.epoch) for each in epochs]
    whole = [point for point in points if _finite(point[0]) and _finite(point[1])]
    if not whole:
        return {}
    xs, ys, numbers = zip(*whole, strict=True)
    colour = f"var({style.colour})"
    told = f"epoch %{{customdata}}<br>%{{x:{x.form}}} {x.title}<br>{y.title} %{{y:{y.form}}}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(name),
        "x": xs,
        "y": ys,
        "customdata": numbers,
        "line": {"color": colour, "width": 2.5, "dash": style.dash},
        "marker": {"symbol": symbol, "size": 8, "color": colour},
        "hovertemplate": f"<b>{escape(name)}</b><br>{told}<extra></extra>",
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
