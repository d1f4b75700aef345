"""A page that needs nothing from any network: style, script and plotly.js stand in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec

from tacit.errors import ConfigError, installing
from tacit_lab.reports.charts.figures import Chart

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def check_installed(page: str) -> None:
    """Check that plotly is installed, which draws the charts.

    Raises:
        ConfigError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise ConfigError(f"{page} needs plotly: {installing('page')}")


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
    from plotly.offline import get_plotlyjs

    figures = json.dumps({chart.key: chart.figure for chart in found}, allow_nan=False)
    # Inside a script element only "<" could end it or begin a comment.
    figures = figures.replace("<", "\\u003c")
    return f"""<script type="application/json" id="figures">{figures}</script>
<script>{get_plotlyjs()}</script>
<script>
{_asset("page.js")}</script>"""


def _asset(name: str) -> str:
    return (files("tacit_lab.reports") / name).read_text(encoding="utf-8")
