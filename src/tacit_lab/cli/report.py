"""`tacit report`: write the page of a comparison, and its traces, from its records."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit import files
from tacit.errors import ConfigError
from tacit_lab.cli import parsing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tacit.timelines import Timeline

PAGE = "report.html"
RECORDS = "records.jsonl"
TIMELINE = "timeline.jsonl"
DESCRIPTION = "comparison.json"
TRACES = "traces"


def command(
    folder: Annotated[
        str, typer.Argument(help="The folder that tacit compare wrote, e.g. my-run", metavar="DIR")
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where to write the page; by default DIR/report.html, e.g. page.html. "
            "The folder traces is made next to it",
        ),
    ] = None,
    latex: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Write the table for LaTeX here instead, and the methods' BibTeX beside it, e.g. table.tex",
            show_default=False,
        ),
    ] = None,
    csv: Annotated[
        str | None,
        typer.Option(
            "--csv",
            metavar="PATH",
            help="Write the table's numbers here instead, e.g. table.csv",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(
            "--png",
            metavar="PATH",
            help="Draw the curves here instead, in the format of the name's ending, e.g. curves.png, or .pdf",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Build report.html from the records in a folder; also of a run that failed, or still goes on.

    Next to it is a trace of each algorithm, traces/ALGORITHM.json, for ui.perfetto.dev or chrome://tracing,
    if the folder has timelines. For a paper there are --latex, --csv and --png. E.g.
    tacit report tacit-out/20260101-120000-digits
    """
    source, page = parsing.path("DIR", folder), parsing.path("--out", out)
    assert source is not None
    if not os.path.isfile(source / RECORDS):  # False, and no error, if a name is too long
        raise ConfigError(f"{source} holds no {RECORDS}: give the folder that tacit compare wrote")
    for_paper = [parsing.path("--latex", latex), parsing.path("--csv", csv), parsing.path("--png", png)]
    lines = _write_for_paper(source, *for_paper) if any(for_paper) else []
    if page is not None or not lines:
        lines += write(source / RECORDS, page or source / PAGE)
    for line in lines:
        typer.echo(line)


def _write_for_paper(source: Path, latex: Path | None, csv: Path | None, png: Path | None) -> list[str]:
    from tacit_lab import records as schema
    from tacit_lab import reports
    from tacit_lab.reports import paper

    found, _ = reports.salvage(source / RECORDS, schema.read)
    comparison = reports.compare(found)
    lines = []
    if latex is not None:
        runs = [record for record in found if isinstance(record, schema.RunRecord)]
        beside = latex.with_suffix(".bib")
        files.put(latex, paper.to_latex(comparison, runs, _command(source)))
        files.put(beside, paper.to_bibtex(row.algorithm for row in comparison.rows))
        lines += [f"Table: {latex}, for \\usepackage{{booktabs}}", f"Methods: {beside}"]
    if csv is not None:
        files.put(csv, paper.to_csv(comparison))
        lines.append(f"Numbers: {csv}")
    if png is not None:
        paper.draw(comparison, found, png)
        lines.append(f"Figure: {png}")
    return lines


def _command(source: Path) -> str:
    """What the comparison was called with; "" where that was not kept."""
    try:
        return str(json.loads((source / DESCRIPTION).read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write(records: Path, target: Path) -> list[str]:
    """Write the page of a file of records, and the traces of the timelines next to the records.

    Returns:
        Lines for the user that say where these files are.

    Raises:
        ConfigError: There are no records, or a file cannot be written.
    """
    from tacit import timelines
    from tacit_lab import records as schema
    from tacit_lab import reports

    found, cut = reports.salvage(records, schema.read)
    beside = records.with_name(TIMELINE)
    timed = reports.salvage(beside, timelines.read)[0] if beside.is_file() else []
    files.put(target, reports.page(found, timed, cut=cut))
    lines = [f"Report: {target}"]
    if timed:
        folder = target.with_name(TRACES)
        _write_traces(timed, folder)
        lines.append(f"Traces: {folder}, to open in ui.perfetto.dev or chrome://tracing")
    return lines


def _write_traces(timelines: Sequence[Timeline], folder: Path) -> None:
    """Write a file for each algorithm."""
    from tacit_lab import reports

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    for algorithm in dict.fromkeys(each.algorithm for each in timelines):
        ranks = {each.rank: each for each in timelines if each.algorithm == algorithm}
        name = re.sub(r"[^\w.,=+-]", "_", algorithm)
        trace = json.dumps(reports.trace(ranks.values()), separators=(",", ":"))
        files.put(folder / f"{name}.json", trace)
