"""One HTML page with everything that a comparison's records say; it needs nothing from any network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec

from tacit.errors import ConfigError
from tacit.records import Record, RunRecord
from tacit.reports import story
from tacit.reports.columns import explained
from tacit.reports.comparison import MEANINGS, UNSHAPED, Comparison, Row, compare
from tacit.reports.details import details
from tacit.reports.figures import Chart, Style, styles
from tacit.reports.sections import sections, swatch
from tacit.reports.servers import servers
from tacit.reports.table import cells
from tacit.timelines import Timeline

__all__ = ["page"]

_CUT = "The last line of the records was cut short and is left out."
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page(records: Iterable[Record], timelines: Iterable[Timeline] = (), *, cut: bool = False) -> str:
    """Build the page from records; runs that failed or never ended are named as such.

    Args:
        records: What one comparison wrote down.
        timelines: What the ranks did when, of any of its algorithms.
        cut: Whether a line at the end could not be read; the page then says so.

    Raises:
        ConfigError: There are no records, they cannot be compared, or plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise ConfigError("report.html needs plotly: pip install 'tacit[page]'")
    records = story.close_open_runs(records)
    if not records:
        raise ConfigError("these records are empty, so there is nothing to report")
    runs = [record for record in records if isinstance(record, RunRecord)]
    comparison = compare(records) if runs else None
    found = sections(comparison, records, timelines) if comparison else []
    parts = [
        _header(comparison),
        _notices([*story.notices(comparison, records), *([_CUT] if cut else [])]),
        _table(comparison) if comparison and comparison.rows else "",
        *(html for html, _ in found),
        servers(records),
        details(comparison, runs) if comparison else "",
    ]
    charts = [chart for _, charts in found for chart in charts]
    return _document(_title(comparison), "\n".join(filter(None, parts)), charts)


def _document(title: str, body: str, found: Sequence[Chart]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)} · tacit</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
{body}
</main>
<footer>Made by tacit from what <code>tacit compare</code> wrote down. This file needs no network.</footer>
{_scripts(found) if found else ""}
</body>
</html>
"""


def _scripts(found: Sequence[Chart]) -> str:
    from plotly.offline import get_plotlyjs

    figures = json.dumps({chart.key: chart.figure for chart in found}, allow_nan=False)
    # Inside a script element only "<" could end it or begin a comment.
    figures = figures.replace("<", "\\u003c")
    return f"""<script type="application/json" id="figures">{figures}</script>
<script>{get_plotlyjs()}</script>
<script>
{_asset("page.js")}</script>"""


def _asset(name: str) -> str:
    return (files("tacit.reports") / name).read_text(encoding="utf-8")


def _title(comparison: Comparison | None) -> str:
    return f"{comparison.recipe} on {comparison.cluster}" if comparison else "No run began"


def _header(comparison: Comparison | None) -> str:
    said = story.headline(comparison) if comparison else "Every run ended before its first record."
    badge = f' <span class="badge">{UNSHAPED}</span>' if comparison and not comparison.shaped else ""
    return f"""<header>
<p class="brand">tacit compare</p>
<h1>{escape(_title(comparison))}{badge}</h1>
<p class="lead">{_unbroken(escape(said))}</p>
</header>"""


def _unbroken(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(\d) (?=%|[GMk]bit/s|ms|s |MB)", r"\1&nbsp;", sentence)


def _notices(texts: Sequence[str]) -> str:
    items = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notices">\n{items}\n</ul>' if texts else ""


def _table(comparison: Comparison) -> str:
    paint = styles(comparison)
    rows = "\n".join(_row(row, paint[row.algorithm]) for row in comparison.rows)
    alone = comparison.compute_only_seconds
    limit = "" if alone is None else f"; without communication {alone:.1f} s"
    asked = f"epochs {comparison.epochs}, seed {comparison.seed}, target accuracy {comparison.target:g}"
    below = f'<p class="asked">{escape(asked + limit)}</p>\n'
    return f"""<section aria-label="Results">
{explained(MEANINGS, rows, below)}
</section>"""


def _row(row: Row, style: Style) -> str:
    name, *numbers = (escape(cell) for cell in cells(row))
    kind = "" if row.status == "ok" else ' class="bad"'
    head = f'<th scope="row">{swatch(style)}{name}</th>'
    return f"<tr{kind}>{head}{''.join(f'<td>{number}</td>' for number in numbers)}</tr>"
