"""What the site adds to the pages: files that they link to outside docs/, and the algorithms' docstrings.

The pages are read in the repository too, so their links are relative there: `../benchmarks/results/x.json`.
On the site each file that is linked so has a copy under `repository/`.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import tacit

ROOT = Path(__file__).resolve().parent.parent
MARKER = "<!-- algorithms, line by line -->"
_ROW = re.compile(r"^\|.*$(?!\n\|[ :]*-)", re.MULTILINE)  # but not that of a table's head
_LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")


_UNITS = re.compile(r"(?<=\d) (?=(?:±|%|[µm]?s|[kMG]i?B|[kMG]bit/s)(?!\w))|(?<=±) (?=\d)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version beside the name."""
    config.site_name += f" {tacit.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a copy of every file outside docs/ that a page links to."""
    for page in list(files.documentation_pages()):
        for _, target, _ in _LINK.findall(page.content_string):
            outside = _outside(page.src_uri, target)
            if outside and files.get_file_from_path(_copy(outside)) is None:
                files.append(File.generated(config, _copy(outside), abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at those copies, keep a table's figures on one line, put the docstrings at the marker."""

    def pointed(link: re.Match[str]) -> str:
        outside = _outside(page.file.src_uri, link[2])
        if not outside:
            return link[0]
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"{link[1]}{posixpath.relpath(_copy(outside), start)})"

    markdown = _LINK.sub(pointed, markdown)
    markdown = _ROW.sub(lambda row: _UNITS.sub("\u00a0", row[0]), markdown)
    return markdown.replace(MARKER, line_by_line()) if MARKER in markdown else markdown


def _outside(page: str, target: str) -> str | None:
    """The file that a page's link names, from the repository's root; None if it is in docs/, or is none."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return path if not path.startswith(("docs/", "..")) and (ROOT / path).is_file() else None


def _copy(path: str) -> str:
    return f"repository/{path}" + ("" if path.endswith(".json") else ".txt")  # browsers show both


def line_by_line() -> str:
    """Every algorithm's parameters and its module's docstring, in the order of `tacit list`."""
    from tacit.algorithms import ALGORITHMS
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab.algorithm_facts import parameters_of

    modules: dict[str, list[str]] = {}
    for name, build in ALGORITHMS.items():
        modules.setdefault(build.__module__, []).append(name)
    parts = []
    for module, names in modules.items():
        parts.append("## " + ", ".join(names))
        for name in names:
            told = ", ".join(f"`{each.name}` = {_default(each)}" for each in parameters_of(name))
            told = f"Parameters: {told}" if told else "No parameters"
            parts.append(f"What `{name}` changes: {ENTRIES[name].changes}. {told}.")
        paragraphs = (sys.modules[module].__doc__ or "").strip().split("\n\n")
        parts += [_in_columns(each) if "\n    " in f"\n{each}" else each for each in paragraphs]
    return "\n\n".join(parts)


def _in_columns(text: str) -> str:
    return f"```text\n{dedent(text)}\n```"


def _default(parameter: Any) -> str:
    return "(required)" if parameter.required else str(parameter.default).lower()
