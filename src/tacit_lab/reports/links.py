"""The page of measured links: a table of cells for each measurement, coloured by its value."""

from __future__ import annotations

import math
from html import escape

from tacit.links import Links, Matrix, shown
from tacit_lab.reports.document import document

__all__ = ["page"]

_HUE_LOW, _HUE_HIGH = 8, 165  # red and green


def page(links: Links, command: str) -> str:
    """HTML of all measurements; the diagonal is within a node.

    Args:
        command: what has measured them, for the footer.
    """
    first, *_, last = str(links).split("\n\n")
    parts = [
        f'<h1>Links of {len(links.hosts)} nodes</h1><p class="lead">{escape(last)}</p>'
        f"<p>{escape(first)}, measured {escape(links.date)}. From row to column; within a node on the "
        "diagonal. Colours go from the slowest (red) to the fastest link between nodes (green).</p>",
        _section("One stream, Mbit/s", links, links.rate, 1e-6),
        _section(f"{links.flows} streams at once, Mbit/s", links, links.rate_of_flows, 1e-6),
        _section("Both ways at once, Mbit/s each way", links, links.rate_both_ways, 1e-6),
        _section("Latency, ms one way", links, links.latency, 1e3, better_high=False),
    ]
    return document("links", parts, (), command)


def _section(title: str, links: Links, matrix: Matrix, scale: float, *, better_high: bool = True) -> str:
    between = links.between(matrix)
    low, high = (min(between), max(between)) if between else (1.0, 1.0)
    head = "".join(f"<th>{j}</th>" for j in range(len(matrix)))
    rows = []
    for i, row in enumerate(matrix):
        cells = "".join(
            _cell(value, scale, None if i == j else _share(value, low, high, better_high))
            for j, value in enumerate(row)
        )
        rows.append(f"<tr><th>{i} {escape(links.hosts[i])}</th>{cells}</tr>")
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table>'
        f"<thead><tr><th>node</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _share(value: float | None, low: float, high: float, better_high: bool) -> float | None:
    """Where a value stands between the worst, 0, and the best, 1, by its logarithm; half of the best is 0."""
    if value is None:
        return None
    behind = high / value if better_high else value / low
    return 1 - math.log(behind) / math.log(max(high / low, 2.0))


def _cell(value: float | None, scale: float, share: float | None) -> str:
    text = shown(value, scale)
    if share is None:
        return f"<td>{text}</td>"
    hue = _HUE_LOW + share * (_HUE_HIGH - _HUE_LOW)
    return f'<td style="background: hsl({hue:.0f} 60% 50% / 0.35)">{text}</td>'
