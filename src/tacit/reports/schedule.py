"""The chart of what an adaptive schedule chose in the course of a run: periods, delays and phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from tacit.records import EpochRecord, Record
from tacit.reports.figures import Chart, Figure, Style, tint
from tacit.timelines import Change, Timeline

__all__ = ["schedule_chart"]

PHASE = "phase"
MEANINGS = {
    "period": "period: steps from one round to the next",
    "delay": "delay: steps until a round's answer is applied",
    "local": "local: steps between two exchanges inside a node",
}
LINES = {"period": ("", "solid"), "delay": ("var(--ink)", "dash"), "local": ("var(--dim)", "dot")}
"""Colour and dashes; a period has the algorithm's colour."""
PHASES = {0.0: "warm-up", 1.0: "cycling", 2.0: "cool-down"}


def schedule_chart(
    timeline: Timeline, records: Sequence[Record], paint: Mapping[str, Style], place: int
) -> Chart | None:
    """One algorithm's schedule over the epochs; None where it never changed.

    Args:
        timeline: Of one of its ranks; all remember the same.
        records: Of all algorithms; they tell how many steps an epoch has.
        paint: The algorithms' styles.
        place: Of the chart among its like, which makes its key.
    """
    changes = _of_one_level(timeline.changes)
    epochs = [
        each for each in records if isinstance(each, EpochRecord) and each.algorithm == timeline.algorithm
    ]
    if len(changes) < 2 or not epochs:
        return None
    per_epoch, end = epochs[0].step / epochs[0].epoch, epochs[-1].step
    curves = {key: curve for key in LINES if (curve := _curve(key, changes, end))}
    if not curves:
        return None
    colour = tint(timeline.algorithm, paint)
    bands = _bands(_curve(PHASE, changes, end), per_epoch)
    layout: Figure = {
        "xaxis": {"title": {"text": "epochs"}, "range": [0, end / per_epoch]},
        "yaxis": {"title": {"text": "steps"}, "rangemode": "tozero"},
        **bands,
    }
    return Chart(
        key=f"schedule-{place}",
        title=timeline.algorithm,
        note="; ".join(MEANINGS[key] for key in curves).capitalize() + ".",
        figure={
            "data": [_trace(key, curve, colour, per_epoch) for key, curve in curves.items()],
            "layout": layout,
        },
    )


def _of_one_level(changes: Sequence[Change]) -> list[Change]:
    """Those of the level whose schedule changed most."""
    levels = [change.level for change in changes]
    most = max(levels, key=levels.count, default=0)
    return [change for change in changes if change.level == most]


def _curve(key: str, changes: Sequence[Change], end: int) -> list[tuple[int, float]]:
    """(step, value) at each corner of a line in steps; nothing where the value never was there."""
    corners: list[tuple[int, float]] = []
    for change in changes:
        value = change.values.get(key)
        if value is None or (corners and corners[-1][1] == value):
            continue
        corners += [(change.step, corners[-1][1])] if corners else []
        corners.append((change.step, value))
    return [*corners, (end, corners[-1][1])] if corners else []


def _trace(key: str, curve: Sequence[tuple[int, float]], tinted: str, per_epoch: float) -> Figure:
    colour, dash = LINES[key]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": key,
        "x": [round(step / per_epoch, 4) for step, _ in curve],
        "y": [value for _, value in curve],
        "customdata": [step for step, _ in curve],
        "line": {"color": colour or tinted, "width": 2.5, "dash": dash},
        "hovertemplate": f"{escape(key)} %{{y}}<br>from step %{{customdata}} on<extra></extra>",
    }


def _bands(curve: Sequence[tuple[int, float]], per_epoch: float) -> Figure:
    """Every other phase shaded, and their names above."""
    phases = [(a, b, value) for (a, value), (b, _) in pairwise(curve) if a < b]
    across = {"xref": "x", "yref": "y domain"}
    shapes = [
        {"type": "rect", "x0": a / per_epoch, "x1": b / per_epoch, "y0": 0, "y1": 1, **across}
        | {"fillcolor": "var(--panel)", "line": {"width": 0}, "layer": "below"}
        for a, b, _ in phases[::2]
    ]
    names = [
        {"text": PHASES.get(value, f"phase {value:g}"), "x": (a + b) / 2 / per_epoch, "y": 1, **across}
        | {"xanchor": "center", "yanchor": "bottom", "showarrow": False}
        for a, b, value in phases
    ]
    return {"shapes": shapes, "annotations": names} if phases else {}
