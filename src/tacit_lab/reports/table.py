"""The comparison as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tacit_lab.reports.comparison import MEANINGS, UNSHAPED, Comparison, Row

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
    result.add_column("algorithm", overflow="fold", vertical="bottom")
    for name in MEANINGS:
        # A word a line, so that all columns fit into 80 characters.
        result.add_column(name.replace(" ", "\n").replace("-", "-\n"), justify="right", no_wrap=True)
    for row in comparison.rows:
        result.add_row(*cells(row), style=None if row.status == "ok" else "red")
    return Group(
        Text(_title(comparison), style="bold"), "", result, "", Text(_caption(comparison), style="dim")
    )


def _title(comparison: Comparison) -> str:
    network = "" if comparison.shaped else f" ({UNSHAPED})"
    return f"{comparison.recipe} on {comparison.cluster}{network}"


def _caption(comparison: Comparison) -> str:
    alone = _number(comparison.compute_only_seconds, "{:.1f} s")
    asked = f"epochs {comparison.epochs}, seed {comparison.seed}, target accuracy {comparison.target:g}"
    chosen = [f"{row.algorithm} went on with {row.chosen}" for row in comparison.rows if row.chosen]
    meanings = [f"{name}: {meaning}" for name, meaning in MEANINGS.items()]
    return "\n".join([f"{asked}; without communication {alone}", *chosen, *meanings])


def cells(row: Row) -> list[str]:
    """A row of the table as texts, a cell a column."""
    return [
        row.algorithm if row.status == "ok" else f"{row.algorithm} ({row.status})",
        _number(row.accuracy, "{:.4f}"),
        _number(row.seconds, "{:.1f}"),
        _number(row.seconds_to_target, "{:.1f}"),
        _number(row.speedup, "{:.2f}x"),
        _number(row.mb_between_nodes, "{:.1f}"),
        _number(row.reduction, "{:.1%}"),
        _number(row.of_compute_only, "{:.1%}"),
    ]


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
