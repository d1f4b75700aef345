"""The comparison as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tacit.reports.comparison import MEANINGS, UNSHAPED, Comparison, Row

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["table"]

NOTHING = "–"


def table(comparison: Comparison) -> Table:
    """One line for each algorithm, and under them what the columns mean."""
    from rich.table import Table

    result = Table(
        title=_title(comparison),
        caption=_caption(),
        caption_justify="left",
        title_justify="left",
        expand=False,
    )
    result.add_column("algorithm", overflow="fold")
    for name in MEANINGS:
        result.add_column(name, justify="right")
    for row in comparison.rows:
        result.add_row(*_cells(row), style=None if row.status == "ok" else "red")
    return result


def _title(comparison: Comparison) -> str:
    parts = [f"{comparison.recipe} on {comparison.cluster}"]
    if not comparison.shaped:
        parts.append(UNSHAPED)
    parts += [f"{comparison.epochs} epochs", f"seed {comparison.seed}", f"target {comparison.target:g}"]
    if comparison.compute_only_seconds is not None:
        parts.append(f"compute-only {comparison.compute_only_seconds:.1f} s")
    return ", ".join(parts)


def _caption() -> str:
    return "\n".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())


def _cells(row: Row) -> list[str]:
    name = row.algorithm if row.status == "ok" else f"{row.algorithm} ({row.status})"
    return [
        name,
        _number(row.seconds, "{:.1f}"),
        _number(row.seconds_to_target, "{:.1f}"),
        _number(row.speedup, "{:.2f}x"),
        _number(row.mb_between_nodes, "{:.1f}"),
        _number(row.reduction, "{:.1%}"),
        _number(row.of_compute_only, "{:.1%}"),
        _number(row.accuracy, "{:.4f}"),
    ]


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
