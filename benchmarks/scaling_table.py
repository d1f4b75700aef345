"""What scaling.py has measured, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markdown_tables import markdown
from runs import COMPUTE_ONLY

TITLES = {
    "flat": "One rank a node, with a parameter server",
    "nodes": "Nodes of several ranks",
}


def table(result: Mapping[str, Any]) -> str:
    """A table for each ladder: milliseconds a step, and MB a step and rank, by cluster; and how they grow."""
    about = result["hardware"]
    parts = [
        f"{about['date']}, {about['cpu']}, {about['cores']} cores, Python {about['python']}, torch "
        f"{about['torch']}, tacit at {about['commit']}. {result['parameters']:,} parameters."
    ]
    for ladder, title in TITLES.items():
        rows = [row for row in result["rows"] if row["ladder"] == ladder]
        grown = [row for row in result["growth"] if row["ladder"] == ladder]
        if rows:
            parts += [f"### {title}", _ladder(rows, grown)]
        sent = [f"{row['mb_by_servers']:.1f}" for row in rows if row["mb_by_servers"]]
        if sent:
            parts.append(f"What the server's interface sends in a step of `ps`: {', '.join(sent)} MB.")
    return "\n\n".join(parts)


def _ladder(rows: Sequence[Mapping[str, Any]], grown: Sequence[Mapping[str, Any]]) -> str:
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    found = {(row["arm"], row["cluster"]): row for row in rows}
    names = [cluster.partition("@")[0] for cluster in clusters]
    head = ["", *(f"{name} ms" for name in names), "grows", *(f"{name} MB" for name in names), "grows"]
    lines = []
    for about in grown:
        mine = [found.get((about["arm"], cluster)) for cluster in clusters]
        lines.append(
            [
                f"`{about['arm']}`",
                *("-" if row is None else f"{row['step_ms']:.0f}" for row in mine),
                _exponent(about["step_ms"]),
                *("-" if row is None else f"{row['mb_per_rank']:.3f}" for row in mine),
                _exponent(about["mb_per_rank"] if about["arm"] != COMPUTE_ONLY else None),
            ]
        )
    return markdown(head, lines)


def _exponent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
