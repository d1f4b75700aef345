"""Tables as Markdown, and their places on pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tacit.files import put

BAR = "\\|"
"""One that does not end a cell."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, without the end of its last line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(each.replace('|', BAR) for each in line)} |" for line in lines)


def part(mark: str) -> re.Pattern[str]:
    """What stands between `<!-- MARK -->` and `<!-- as far as here -->`."""
    return re.compile(rf"(?<=<!-- {re.escape(mark)} -->\n\n).*(?=\n\n<!-- as far as here -->)", re.DOTALL)


def fill(page: Path, mark: str, text: str) -> None:
    """Put a text into this `part` of a page.

    Raises:
        SystemExit: the page lacks these marks.
    """
    filled, count = part(mark).subn(lambda _: text, page.read_text())
    if not count:
        raise SystemExit(f"{page} has no place for it: write <!-- {mark} --> and <!-- as far as here -->")
    put(page, filled)
