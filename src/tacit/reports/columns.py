"""A table whose columns are explained below it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["explained"]


def explained(columns: Mapping[str, str], rows: str, between: str = "", first: str = "algorithm") -> str:
    """The table with a row for each algorithm, or what else is `first`, and what its columns mean.

    Args:
        columns: what each means, in order; before them stands the first one, of names.
        rows: in HTML.
        between: HTML that stands below the table.
    """
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in (first, *columns))
    terms = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in columns.items())
    return f"""<div class="scroll" tabindex="0"><table>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
{between}<dl>
{terms}
</dl>"""
