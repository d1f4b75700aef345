"""What stands on the pages: blocks of code, commands, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *SITE]
LOG = sorted((ROOT / "dev" / "log").glob("*.md"))
EVERY = [*PAGES, ROOT / "CONTRIBUTING.md", *LOG]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    \S.*$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FRAGMENT = "<!-- fragment:"
"""In the line before a block: it is compiled, and not run, for the reason that follows."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line where that begins, and whether it is a fragment."""

    page: Path
    line: int
    language: str
    text: str
    fragment: bool

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def rows_of(page: str) -> Iterator[list[str]]:
    """The cells of each row of the page's tables."""
    for line in text_of(page).splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


@cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        line = text[: match.start(2)].count("\n") + 1
        found.append(Block(page, line, match[1], match[2], before.startswith(FRAGMENT)))
    return found


@cache
def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def shell_lines(page: Path) -> Iterator[str]:
    """What a reader may type: indented lines, lines of fenced shell blocks, and code in the text."""
    yield from (line.strip() for line in _INDENTED.findall(prose(page)))
    for block in blocks(page):
        if block.language in ("sh", "bash", "console"):
            yield from (line.strip() for line in block.text.splitlines())
    yield from _INLINE.findall(_INDENTED.sub("", prose(page)))


def inline(page: Path) -> list[str]:
    return _INLINE.findall(prose(page))


def links(page: Path) -> list[str]:
    return _LINK.findall(_INLINE.sub("", prose(page)))


def anchors(page: Path) -> set[str]:
    """Of the headings, as a forge makes them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {heading.strip().replace(" ", "-") for heading in plain}
