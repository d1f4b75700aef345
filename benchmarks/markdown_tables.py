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


def fill(page: Path, mark: str, text: str) -> None:
    """Put a text between `<!-- MARK -->` and `<!-- as far as here -->` of a page.

    Raises:
        SystemExit: the page lacks these marks.
    """
    part = rf"(?<=<!-- {re.escape(mark)} -->\n\n).*(?=\n\n<!-- as far as here -->)"
    filled, count = re.subn(part, lambda _: text, page.read_text(), flags=re.DOTALL)
    if not count:
        raise SystemExit(f"{page} has no place for it: write <!-- {mark} --> and <!-- as far as here -->")
    put(page, filled)
