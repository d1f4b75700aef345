"""A page that needs nothing from any network: style, script and a compressed plotly.js stand in it."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from tacit_lab.reports.charts.figures import Chart

PLOTLY = "plotly-basic.min.js"
"""With lines and bars, all that the charts need: version 4.1.1 as npm's plotly.js-basic-dist-min has it."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, parts: Sequence[str], found: Sequence[Chart], command: str) -> str:
    """A page of these parts, with all that its charts need.

    Args:
        parts: HTML, one below the other; the empty ones are left out.
        found: the charts for which there are boxes in the parts.
        command: The command that makes the page, for the footer.
    """
    body = "\n".join(filter(None, parts))
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
<footer>Made by tacit from what <code>{escape(command)}</code> wrote down.
This file needs no network.</footer>
{_scripts(found) if found else ""}
</body>
</html>
"""


def _scripts(found: Sequence[Chart]) -> str:
    figures = json.dumps({chart.key: chart.figure for chart in found}, allow_nan=False)
    return f"""<script type="text/plain" id="figures">{_packed(figures)}</script>
<script type="text/plain" id="plotly">{_packed(_asset(PLOTLY))}</script>
<script>
{_asset("page.js")}</script>"""


def _packed(text: str) -> str:
    """As page.js unpacks it; it also keeps any text from ending its element."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (files("tacit_lab.reports") / name).read_text(encoding="utf-8")
