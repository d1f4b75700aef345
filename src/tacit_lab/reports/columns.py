"""A table whose columns are explained below it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple


class TableRow(NamedTuple):
    """A row of the table: its name, and a text for each column.

    Attributes:
        mark: HTML before the name, such as its colour.
        bad: whether it failed.
    """

    name: str
    cells: Sequence[str]
    mark: str = ""
    bad: bool = False


def explained(
    columns: Mapping[str, str], lines: Iterable[TableRow], between: str = "", first: str = "algorithm"
) -> str:
    """The table with a row for each algorithm, or what else is `first`, and what its columns mean.

    Args:
        columns: what each means, in order; before them stands the first one, of names.
        lines: the rows.
        between: HTML that stands below the table.
    """
    return f"{cards(columns, lines, first)}\n{between}{meanings(columns)}"


def cards(columns: Iterable[str], lines: Iterable[TableRow], first: str = "algorithm") -> str:
    """The table alone. Every cell carries the name of its column, for screens on which a row is a card."""
    names = list(columns)
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in (first, *names))
    rows = "\n".join(_row(line, names) for line in lines)
    return f"""<div class="scroll" tabindex="0"><table class="cards">
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>"""


def meanings(columns: Mapping[str, str]) -> str:
    """What each column means."""
    terms = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in columns.items())
    return f"<dl>\n{terms}\n</dl>"


def _row(line: TableRow, columns: Sequence[str]) -> str:
    kind = ' class="bad"' if line.bad else ""
    cells = "".join(
        f'<td data-column="{escape(column)}">{escape(cell)}</td>'
        for column, cell in zip(columns, line.cells, strict=True)
    )
    return f'<tr{kind}><th scope="row">{line.mark}{escape(line.name)}</th>{cells}</tr>'
