"""The chart of an adaptive schedule: its periods, delays and phases over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tacit.timelines import Change, Timeline
from tacit_lab.records import EpochRecord, Record
from tacit_lab.reports.charts.figures import Chart, Figure, Style, tint

PHASE = "phase"
MEANINGS = {
    "period": "steps from one round to the next",
    "delay": "steps until a round's answer is applied",
    "local": "steps between two exchanges inside a node",
}
LETTERS = {"period": "B", "delay": "W", "local": "L"}
"""DASO's, where all three may change."""
LINES = {"period": ("", "solid"), "delay": ("var(--ink)", "dash"), "local": ("var(--dim)", "dot")}
"""Colour and dashes; a period has the algorithm's colour."""
APART = 0.018
"""How far a line stands below the one before it, of the largest value, so that both are seen where equal."""
BLOCKING = "They hold while cycling; in the other phases a round follows every step, and is waited for."
PHASES = {0.0: "warm-up", 1.0: "cycling", 2.0: "cool-down"}


class _Segment(NamedTuple):
    """A value of the schedule state, from one step to another."""

    begun: int
    ended: int
    value: float


def schedule_chart(
    timeline: Timeline, records: Sequence[Record], paint: Mapping[str, Style], place: int
) -> Chart | None:
    """One algorithm's schedule over the epochs; None where it never changed.

    Args:
        timeline: Of one of its ranks; the schedule is equal on all.
        records: Of all algorithms; they have the number of steps of an epoch.
        paint: The algorithms' styles.
        place: Of the chart among its like, which makes its key.
    """
    changes = _of_one_level(timeline.changes)
    mine = [each for each in records if each.algorithm == timeline.algorithm]
    epochs = [each for each in mine if isinstance(each, EpochRecord)]
    if len(changes) < 2 or not epochs:
        return None
    per_epoch, end = epochs[0].step / epochs[0].epoch, epochs[-1].step
    curves = {key: pieces for key in LINES if (pieces := _pieces(key, changes, end))}
    if not curves:
        return None
    colour, most = tint(timeline.algorithm, paint), max(p.value for ps in curves.values() for p in ps)
    names = {key: f"{key} {LETTERS[key]}" if "delay" in curves else key for key in curves}
    said = [f"{name[0].upper()}{name[1:]}: {MEANINGS[key]}." for key, name in names.items()]
    phases = _pieces(PHASE, changes, end)
    traces = [
        _trace(names[key], pieces, _pen(key, colour), per_epoch, _hidden(key, curves) * APART * most)
        for key, pieces in curves.items()
    ]
    ticks = {"dtick": max(1, round(most / 5)), "range": [0, 1.1 * most]}
    layout: Figure = {
        "xaxis": {"title": {"text": "epochs"}, "range": [0, end / per_epoch]},
        "yaxis": {"title": {"text": "steps"}, **ticks},
        **_bands(phases, per_epoch),
    }
    return Chart(
        key=f"schedule-{place}",
        title=timeline.algorithm,
        note=" ".join([*said, BLOCKING] if phases else said),
        figure={"data": traces, "layout": layout},
    )


def _of_one_level(changes: Sequence[Change]) -> list[Change]:
    """The changes of the level whose schedule changed most."""
    levels = [change.level for change in changes]
    most = max(levels, key=levels.count, default=0)
    return [change for change in changes if change.level == most]


def _pieces(key: str, changes: Sequence[Change], end: int) -> list[_Segment]:
    """The values of one key up to step `end`; empty if it never occurs."""
    found: list[tuple[int, float]] = []
    for change in changes:
        value = change.values.get(key)
        if value is not None and not (found and found[-1][1] == value):
            found.append((change.step, value))
    pieces = [_Segment(a, b, value) for (a, value), (b, _) in pairwise([*found, (end, 0.0)])]
    return [piece for piece in pieces if piece.begun < piece.ended]


def _hidden(key: str, curves: Mapping[str, Sequence[_Segment]]) -> int:
    """How many of the curves drawn before are at the same place somewhere."""
    before = [*curves][: [*curves].index(key)]
    return sum(
        any(
            a.value == b.value and a.begun < b.ended and b.begun < a.ended
            for a in curves[key]
            for b in curves[name]
        )
        for name in before
    )


def _pen(key: str, tinted: str) -> Figure:
    colour, dash = LINES[key]
    return {"color": colour or tinted, "width": 2.5, "dash": dash}


def _trace(name: str, pieces: Sequence[_Segment], pen: Figure, per_epoch: float, below: float) -> Figure:
    corners = [(step, piece) for piece in pieces for step in (piece.begun, piece.ended)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round(step / per_epoch, 4) for step, _ in corners],
        "y": [round(piece.value - below, 4) for _, piece in corners],
        "customdata": [
            f"{name}: {piece.value:g}<br>steps {piece.begun} to {piece.ended - 1}" for _, piece in corners
        ],
        "line": pen,
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _bands(phases: Sequence[_Segment], per_epoch: float) -> Figure:
    """Every other phase shaded, and their names above."""
    across = {"xref": "x", "yref": "y domain"}
    shapes = [
        {
            "type": "rect",
            "x0": each.begun / per_epoch,
            "x1": each.ended / per_epoch,
            "y0": 0,
            "y1": 1,
            **across,
        }
        | {"fillcolor": "var(--panel)", "line": {"width": 0}, "layer": "below"}
        for each in phases[::2]
    ]
    names = [
        {"text": PHASES.get(each.value, f"phase {each.value:g}"), "y": 1, **across}
        | {"x": (each.begun + each.ended) / 2 / per_epoch, "xanchor": "center", "yanchor": "bottom"}
        | {"showarrow": False}
        for each in phases
    ]
    return {"shapes": shapes, "annotations": names} if phases else {}
