"""Who sent how much to whom, as a table of cells for each algorithm, coloured by their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tacit_lab.cluster import Cluster
from tacit_lab.records import EndRecord, Record, RunRecord
from tacit_lab.reports.charts.figures import Style
from tacit_lab.reports.sections import swatch

_DEEPEST = 62
"""How much of its colour the largest cell has, in percent: text on it stays readable."""
_WIDE = 7
"""From so many nodes on a table has a line of the page for itself."""
_SAID = """MB from each node (row) to each other (column) in training, counted at the interfaces, with all
that TCP adds: where much goes one way, a little comes back. The deeper the colour, the more; each table has
its own scale. The last column is what a node sent in all, the last row what it received."""

_OF_SCRIPTS = """ Of a script all is counted from its start to its end, also what DDP sends to begin with, and
what the table leaves out."""


def traffic(records: Sequence[Record], paint: Mapping[str, Style]) -> str:
    """A table for each algorithm of whose run it is known; "" if it is of none."""
    records = list(records)
    ends = {record.algorithm: record for record in records if isinstance(record, EndRecord)}
    clusters = {each.algorithm: each.cluster for each in records if isinstance(each, RunRecord)}
    of_script = any(each.epochs is None for each in records if isinstance(each, RunRecord))
    tables = [
        _table(name, end.traffic, Cluster.parse(clusters[name]).nodes, paint[name])
        for name, end in ends.items()
        if end.traffic is not None and len(end.traffic) > 1 and name in clusters and name in paint
    ]
    if not tables:
        return ""
    return f"""<section aria-label="Who sent to whom">
<h2>Who sent how much to whom</h2>
<p class="asked">{_SAID}{_OF_SCRIPTS if of_script else ""}</p>
<div class="heats">
{chr(10).join(tables)}
</div>
</section>"""


def names(places: int, nodes: int) -> list[str]:
    """The names of the nodes: their numbers; after those with ranks, the servers."""
    return [str(i) if i < nodes else f"server {i - nodes}" for i in range(places)]


def digits(largest: float) -> int:
    """The number of decimals of megabytes, so that the largest has three significant digits."""
    return next((count for count, least in enumerate((100.0, 10.0, 1.0)) if largest >= least), 3)


def _table(algorithm: str, rows: Sequence[Sequence[int]], nodes: int, style: Style) -> str:
    called = names(len(rows), nodes)
    largest = max(each for row in rows for each in row) or 1
    form = f"{{:,.{digits(largest / 1e6)}f}}"
    head = "".join(f'<th scope="col">{each}</th>' for each in called)
    body = "\n".join(
        f'<tr><th scope="row">{called[i] if i >= nodes else f"node {i}"}</th>{_cells(i, row, largest, form)}'
        f'<td class="sum">{form.format(sum(row) / 1e6)}</td></tr>'
        for i, row in enumerate(rows)
    )
    received = "".join(
        f'<td class="sum">{form.format(sum(column) / 1e6)}</td>' for column in zip(*rows, strict=True)
    )
    total = form.format(sum(map(sum, rows)) / 1e6)
    wide = " wide" if len(rows) >= _WIDE else ""
    return f"""<div class="heat{wide}" tabindex="0"><table style="--hue: var({style.colour})">
<caption>{swatch(style)}{escape(algorithm)}: MB from row to column</caption>
<thead><tr><th scope="col">from \\ to</th>{head}<th scope="col">sent</th></tr></thead>
<tbody>
{body}
<tr><th scope="row">received</th>{received}<td class="sum">{total}</td></tr>
</tbody>
</table></div>"""


def _cells(sender: int, row: Sequence[int], largest: int, form: str) -> str:
    return "".join(
        "<td></td>"
        if place == sender
        else f'<td style="--heat: {_DEEPEST * each / largest:.0f}%">{form.format(each / 1e6)}</td>'
        for place, each in enumerate(row)
    )
