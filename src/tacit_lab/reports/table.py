"""The comparison as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tacit_lab.intervals import Mean
from tacit_lab.reports.comparison import Comparison, Row

if TYPE_CHECKING:
    from rich.console import Group

NOTHING = "–"


def table(comparison: Comparison) -> Group:
    """A title, one line for each algorithm, and under them what the columns mean."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    result = Table(
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    columns = comparison.columns
    # Names stand beside the first line of a cell of two, and below a heading of three.
    result.add_column("algorithm", overflow="fold", vertical="top" if "gap" in columns else "bottom")
    for name in columns:
        # A word a line, so that all columns fit into 80 characters.
        result.add_column(name.replace(" ", "\n").replace("-", "-\n"), justify="right", no_wrap=True)
    for row in comparison.rows:
        result.add_row(*cells(row, columns), style=None if row.status == "ok" else "red")
    return Group(
        Text(_title(comparison), style="bold"), "", result, "", Text(_caption(comparison), style="dim")
    )


def _title(comparison: Comparison) -> str:
    network = f" ({comparison.network})" if comparison.network else ""
    return f"{comparison.recipe} on {comparison.cluster}{network}"


def _caption(comparison: Comparison) -> str:
    alone = f"; without communication {_number(comparison.compute_only_seconds, '{:.1f} s')}"
    alone = alone if "of compute-only" in comparison.columns else ""
    chosen = [f"{row.algorithm} went on with {row.chosen}" for row in comparison.rows if row.chosen]
    meanings = [f"{name}: {meaning}" for name, meaning in comparison.columns.items()]
    return "\n".join([comparison.asked + alone, *chosen, *meanings])


def cells(row: Row, columns: Iterable[str]) -> list[str]:
    """A row of the table as texts: the name, and a cell for each of these columns."""
    texts = {
        "rate": f"x{row.rate:g}",
        "accuracy": _number(row.accuracy, "{:.4f}"),
        "loss": _number(row.loss, "{:.4f}"),
        "gap": _interval(row.gap, "{:+.4f}") if row.accuracy is None else _points(row.gap),
        "seconds": _number(row.seconds, "{:.1f}"),
        "to target": _number(row.seconds_to_target, "{:.1f}"),
        "speedup": _number(row.speedup, "{:.2f}x"),
        "MB between nodes": _number(row.mb_between_nodes, "{:.1f}"),
        "MB by count": _number(row.mb_by_count, "{:.1f}"),
        "reduction": _number(row.reduction, "{:.1%}"),
        "goodput": _number(row.goodput, "{:.1%}"),
        "of compute-only": _number(row.of_compute_only, "{:.1%}"),
    }
    name = row.algorithm if row.status == "ok" else f"{row.algorithm} ({row.status})"
    return [name, *(texts[column] for column in columns)]


def _points(gap: Mean | None) -> str:
    half = None if gap is None or gap.half is None else 100 * gap.half
    return _interval(gap and Mean(100 * gap.mean, half, gap.count), "{:+.2f}")


def _interval(value: Mean | None, form: str) -> str:
    if value is None or value.half is None:
        return _number(None if value is None else value.mean, form)
    return f"{form.format(value.mean)}\n±{form.replace('+', '').format(value.half)}"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
