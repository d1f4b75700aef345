"""A study for a paper: its table in LaTeX or CSV, and the figure of gaps against bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit_lab.reports.paper import COLOURS, cited, csv_of, figure_of, number, save, tabular
from tacit_lab.study.page import Row, front, scale, shown, unit


def to_csv(rows: Sequence[Row]) -> str:
    """A line for each algorithm and length: shares and accuracies 0..1, means with half intervals."""
    return csv_of([dict(_flat(row)) for row in rows])


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield name, value["mean"]
            yield f"{name}_half", value["half"]
        elif not isinstance(value, list):
            yield name, value
    yield "seeds", row["gap"]["count"]


def to_latex(study: Mapping[str, Any], hardware: Mapping[str, object]) -> str:
    r"""A table for the package booktabs, which cites each method by `\cite`; comments say how it was made.

    Args:
        study: what `study.json` holds.
        hardware: where its first training was made.
    """
    rows: Sequence[Row] = study["rows"]
    columns = {
        "bytes": "bytes",
        "accuracy": "- loss" if rows[0]["by_loss"] else "accuracy, %",
        "gap": unit(rows),
    }
    lines = []
    for row in rows:
        texts = shown(row, study["plain"])
        lines.append([cited(row["arm"]), str(row["steps"]), *(number(texts[name]) for name in columns)])
    said = f"{study['task']}; seeds {', '.join(map(str, study['seeds']))}"
    about = [
        said,
        *([f"command: {study['command']}"] if "command" in study else []),
        *(f"{name}: {value}" for name, value in hardware.items()),
        *(f"{row['arm']}, {row['steps']} steps: learning rate x{row['rate']:g}" for row in rows),
    ]
    caption = f"{said}. Gaps are to {study['plain']}, paired by seed, with 95 % intervals by Student's t."
    return tabular(about, ["algorithm", "steps", *columns.values()], lines, caption)


def draw(rows: Sequence[Row], plain: str, target: Path) -> None:
    """Draw gaps against bytes, a panel for each length; a dotted line joins what nothing else beats in both.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format, or the file cannot be written.
    """
    rows = [row for row in rows if row["arm"] != plain and row["bytes"] is not None]
    lengths, arms = sorted({row["steps"] for row in rows}), list(dict.fromkeys(row["arm"] for row in rows))
    figure = figure_of(len(lengths))
    for place, steps in enumerate(lengths, 1):
        plot = figure.add_subplot(1, len(lengths), place, title=f"{steps:,} steps", xscale="log")
        plot.set_xlabel("bytes, % of plain training's")
        plot.set_ylabel(unit(rows) if place == 1 else "")
        here = [row for row in rows if row["steps"] == steps]
        best = front(here)
        line = [100 * row["bytes"] for row in best], [scale(row) * row["gap"]["mean"] for row in best]
        plot.step(*line, where="post", color="#999999", linewidth=1, linestyle=":")
        for row in here:
            plot.errorbar(
                100 * row["bytes"],
                scale(row) * row["gap"]["mean"],
                scale(row) * (row["gap"]["half"] or 0.0),
                fmt="o",
                color=COLOURS[arms.index(row["arm"]) % len(COLOURS)],
                markersize=4,
                capsize=2,
                label=row["arm"],
            )
        plot.axhline(0, color="#999999", linewidth=0.8, linestyle="--")
        plot.grid(alpha=0.3, linewidth=0.5)
    save(figure, target)
