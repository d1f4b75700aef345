"""One HTML page with all of a comparison's records; it needs nothing from any network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from tacit.errors import ConfigError
from tacit.timelines import Timeline
from tacit_lab.records import Record, RunRecord
from tacit_lab.reports import summary
from tacit_lab.reports.charts.figures import Style, styles
from tacit_lab.reports.columns import TableRow, explained
from tacit_lab.reports.comparison import Comparison, Row, compare
from tacit_lab.reports.details import details
from tacit_lab.reports.document import document
from tacit_lab.reports.sections import sections, swatch
from tacit_lab.reports.servers import servers
from tacit_lab.reports.table import cells
from tacit_lab.reports.traffic import traffic

_CUT = "The last line of the records was cut short and is left out."


def page(records: Iterable[Record], timelines: Iterable[Timeline] = (), *, cut: bool = False) -> str:
    """Build the page from records; runs that failed or never ended are named as such.

    Args:
        records: What one comparison wrote down.
        timelines: The ranks' timelines, of any of its algorithms.
        cut: Whether a line at the end could not be read; the page then says so.

    Raises:
        ConfigError: There are no records, or they cannot be compared.
    """
    records = summary.close_open_runs(records)
    if not records:
        raise ConfigError("these records are empty, so there is nothing to report")
    runs = [record for record in records if isinstance(record, RunRecord)]
    comparison = compare(records) if runs else None
    found = sections(comparison, records, timelines) if comparison else []
    parts = [
        _header(comparison),
        _notices([*summary.notices(comparison, records), *([_CUT] if cut else [])]),
        _notices(summary.news(records), "notices news"),
        _table(comparison) if comparison and comparison.rows else "",
        *(html for html, _ in found),
        traffic(records, styles(comparison)) if comparison else "",
        servers(records),
        details(comparison, runs, records) if comparison else "",
    ]
    charts = [chart for _, charts in found for chart in charts]
    return document(_title(comparison), parts, charts, "tacit compare")


def _title(comparison: Comparison | None) -> str:
    return f"{comparison.recipe} on {comparison.cluster}" if comparison else "No run began"


def _header(comparison: Comparison | None) -> str:
    said = summary.headline(comparison) if comparison else "Every run ended before its first record."
    badge = f' <span class="badge">{comparison.network}</span>' if comparison and comparison.network else ""
    return f"""<header>
<p class="brand">tacit compare</p>
<h1>{escape(_title(comparison))}{badge}</h1>
<p class="lead">{_unbroken(escape(said))}</p>
</header>"""


def _unbroken(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(\d) (?=%|[GMk]bit/s|ms|s |MB)", r"\1&nbsp;", sentence)


def _notices(texts: Sequence[str], kind: str = "notices") -> str:
    items = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">\n{items}\n</ul>' if texts else ""


def _table(comparison: Comparison) -> str:
    paint = styles(comparison)
    columns = comparison.columns
    lines = [_line(row, columns, paint[row.algorithm]) for row in comparison.rows]
    alone = comparison.compute_only_seconds
    limit = "" if alone is None else f"; without communication {alone:.1f} s"
    below = f'<p class="asked">{escape(comparison.asked + limit)}</p>\n'
    return f"""<section aria-label="Results" class="results">
{explained(columns, lines, below)}
</section>"""


def _line(row: Row, columns: Iterable[str], style: Style) -> TableRow:
    name, *numbers = cells(row, columns)
    return TableRow(name, numbers, mark=swatch(style), bad=row.status != "ok")
