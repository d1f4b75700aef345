"""The page of a study: gaps against steps and bytes, and what nothing else beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, TypeAlias

from tacit_lab.reports.charts.figures import DASHES, PALETTE, Chart, Figure, Style, line_at
from tacit_lab.reports.columns import TableRow, cards, meanings
from tacit_lab.reports.document import document
from tacit_lab.reports.sections import section, swatch

Row: TypeAlias = Mapping[str, Any]
"""Of `Study.rows`."""
COLUMNS = {
    "bytes": "all that is sent, as a share of plain training's: by the formulas of ring collectives, or of a "
    "script counted at the interfaces",
    "accuracy": "held out, in percent, the mean over the seeds; of a script without one minus its loss",
    "gap": "to plain training, paired by seed, ± half the 95 % interval; in points, or of losses",
    "seconds": "of training: of a recipe processor time, of a script on its cluster",
    "seeds": "pairs of trainings in the gap",
    "rate": "what the learning rate was multiplied by, the best on validation",
    "front": "whether no other algorithm loses less for as few bytes or fewer",
}


def front(rows: Sequence[Row], cost: str = "bytes") -> list[Row]:
    """The Pareto front of rows of one length: those than which none costs as little and loses less.

    Args:
        cost: "bytes" or "seconds".
    """
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row[cost], -row["gap"]["mean"])):
        if not found or row["gap"]["mean"] > found[-1]["gap"]["mean"]:
            found.append(row)
    return found


def page(title: str, rows: Sequence[Row], plain: str) -> str:
    """The whole page.

    Args:
        rows: of one task, of all lengths.
        plain: the arm to which gaps are.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows if row["arm"] != plain))
    paint = {
        arm: Style(f"--c{i % PALETTE}", DASHES[i // PALETTE % len(DASHES)]) for i, arm in enumerate(arms)
    }
    others = [row for row in rows if row["arm"] != plain]
    lengths = sorted({row["steps"] for row in rows})
    by_steps = [_against_steps(others, paint)] if len(lengths) > 1 else []
    lengths_ = sorted({row["steps"] for row in others})
    costs = ["bytes", *(["seconds"] if any(row["on_cluster"] for row in others) else [])]
    drawn = [_against(others, paint, steps, cost) for cost in costs for steps in lengths_]
    by_cost = [chart for chart in drawn if chart is not None]
    key = "\n".join(f"<li>{swatch(style)}{escape(arm)}</li>" for arm, style in paint.items())
    found = [
        section("What length heals", f'<ul class="key">\n{key}\n</ul>', by_steps),
        section("What it costs to send less", f'<ul class="key">\n{key}\n</ul>', by_cost),
    ]
    found = [each for each in found if each[1]]
    head = f'<header>\n<p class="brand">tacit study</p>\n<h1>{escape(title)}</h1>\n</header>'
    tables = [_table(rows, steps, plain, paint) for steps in reversed(lengths)]
    parts = [head, *tables, meanings(COLUMNS), *(html for html, _ in found)]
    return document(title, parts, [chart for _, charts in found for chart in charts], "tacit study")


def _table(rows: Sequence[Row], steps: int, plain: str, paint: Mapping[str, Style]) -> str:
    here = [row for row in rows if row["steps"] == steps]
    best = front([row for row in here if row["arm"] != plain and row["bytes"] is not None])
    lines = []
    for row in sorted(here, key=lambda row: (row["bytes"] is None, row["bytes"])):
        texts = [*shown(row, plain).values(), "yes" if row in best else ""]
        mark = swatch(paint[row["arm"]]) if row["arm"] in paint else ""
        lines.append(TableRow(row["arm"], texts, mark=mark))
    return f'<section class="results">\n<h2>{steps:,} steps</h2>\n{cards(COLUMNS, lines)}\n</section>'


def shown(row: Row, plain: str) -> dict[str, str]:
    """A row as texts, by column, but for the front."""
    return {
        "bytes": "–" if row["bytes"] is None else f"{row['bytes']:.2%}",
        "accuracy": f"{scale(row) * row['accuracy']['mean']:.{2 if scale(row) > 1 else 4}f}",
        "gap": "–" if row["arm"] == plain else _gap(row),
        "seconds": f"{row['seconds']:.1f}",
        "seeds": str(row["gap"]["count"]),
        "rate": f"x{row['rate']:g}",
    }


def scale(row: Row) -> int:
    """Points of accuracy are hundredths; losses stay as they are."""
    return 1 if row["by_loss"] else 100


def _gap(row: Row) -> str:
    gap, digits = row["gap"], 2 if scale(row) > 1 else 4
    half = "" if gap["half"] is None else f" ±{scale(row) * gap['half']:.{digits}f}"
    return f"{scale(row) * gap['mean']:+.{digits}f}{half}"


def unit(rows: Sequence[Row]) -> str:
    """What gaps are, for an axis."""
    return "gap of minus the loss" if rows[0]["by_loss"] else "gap, points"


def _against_steps(rows: Sequence[Row], paint: Mapping[str, Style]) -> Chart:
    traces = []
    for arm, style in paint.items():
        mine = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["steps"])
        traces.append(_trace(arm, [row["steps"] for row in mine], mine, style, "lines+markers"))
    steps = sorted({row["steps"] for row in rows})
    ticks = {"type": "log", "tickvals": steps, "ticktext": [f"{each:,}" for each in steps]}
    layout: Figure = {
        "xaxis": {"title": {"text": "steps (log scale)"}, **ticks},
        "yaxis": {"title": {"text": unit(rows)}},
        **line_at("y", 0.0, "plain training"),
    }
    return Chart(
        key="gap-steps",
        title="Gap against the length of training",
        note="Higher is better; bars are 95 % intervals.",
        figure={"data": traces, "layout": layout},
    )


def _against(rows: Sequence[Row], paint: Mapping[str, Style], steps: int, cost: str) -> Chart | None:
    """Every algorithm, and a line along those that nothing beats in both; None where no cost is known."""
    here = [row for row in rows if row["steps"] == steps and row[cost] is not None]
    if not here:
        return None
    factor, axis = (100, "bytes, % of plain training's") if cost == "bytes" else (1, "training seconds")
    best = front(here, cost)
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "hoverinfo": "skip",
        "x": [factor * row[cost] for row in best],
        "y": [scale(row) * row["gap"]["mean"] for row in best],
        "line": {"color": "var(--limit)", "width": 1.5, "dash": "dot", "shape": "hv"},
    }
    traces = [_trace(row["arm"], [factor * row[cost]], [row], paint[row["arm"]], "markers") for row in here]
    layout: Figure = {
        "xaxis": {"title": {"text": f"{axis} (log scale)"}, "type": "log"},
        "yaxis": {"title": {"text": unit(rows)}},
        **line_at("y", 0.0, "plain training"),
    }
    return Chart(
        key=f"front-{cost}-{steps}",
        title=f"Gap against {cost}, {steps:,} steps",
        note="Higher and left is better. The dotted line joins what nothing else beats in both.",
        figure={"data": [line, *traces], "layout": layout},
    )


def _trace(arm: str, xs: Sequence[float], rows: Sequence[Row], style: Style, mode: str) -> Figure:
    colour = f"var({style.colour})"
    halves = [scale(row) * (row["gap"]["half"] or 0.0) for row in rows]
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape(arm),
        "x": list(xs),
        "y": [scale(row) * row["gap"]["mean"] for row in rows],
        "error_y": {"type": "data", "array": halves, "color": colour, "thickness": 1},
        "line": {"color": colour, "width": 2.5, "dash": style.dash},
        "marker": {"size": 9, "color": colour},
        "hovertemplate": f"<b>{escape(arm)}</b><br>%{{x:.4g}}<br>gap %{{y:+.2f}}<extra></extra>",
    }
