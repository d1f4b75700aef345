"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

BAR = "\\|"
"""One that does not end a cell."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, without the end of its last line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(each.replace('|', BAR) for each in line)} |" for line in lines)
