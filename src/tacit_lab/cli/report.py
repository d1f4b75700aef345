"""`tacit report`: write the page of a comparison or a study, or what a paper takes of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tacit import files
from tacit.errors import ConfigError
from tacit_lab.cli import parsing
from tacit_lab.cli.importing import Modules, import_own

if TYPE_CHECKING:
    from tacit.timelines import Timeline

PAGE = "report.html"
RECORDS = "records.jsonl"
TIMELINE = "timeline.jsonl"
DESCRIPTION = "comparison.json"
TRACES = "traces"
STUDY, RUNS, STUDY_PAGE = "study.json", "runs.jsonl", "study.html"


def command(
    folder: Annotated[
        str, typer.Argument(help="The folder that tacit compare or study wrote, e.g. my-run", metavar="DIR")
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
    modules: Modules = None,
) -> None:
    """Build report.html from the records in a folder; also of a run that failed, or still goes on.

    Next to it is a trace of each algorithm, traces/ALGORITHM.json, for ui.perfetto.dev or chrome://tracing,
    if the folder has timelines. For a paper there are --latex, --csv and --png. Of a study it
    builds study.html. E.g.
    tacit report tacit-out/20260101-120000-digits
    """
    source, page = parsing.path("DIR", folder), parsing.path("--out", out)
    assert source is not None
    if not any(os.path.isfile(source / each) for each in (RECORDS, STUDY)):  # False if a name is too long
        raise ConfigError(
            f"{source} holds no {RECORDS} or {STUDY}: give the folder that tacit compare or study wrote"
        )
    import_own(modules)
    of_study = (source / STUDY).is_file()
    for_paper = [parsing.path("--latex", latex), parsing.path("--csv", csv), parsing.path("--png", png)]
    lines = []
    if any(for_paper):
        lines = _write_for_paper(_study(source) if of_study else _comparison(source), *for_paper)
    if (page is not None or not lines) and of_study:
        lines += _write_page_of_study(source, page or source / STUDY_PAGE)
    elif page is not None or not lines:
        lines += write(source / RECORDS, page or source / PAGE)
    for line in lines:
        typer.echo(line)


class _ForPaper(NamedTuple):
    latex: Callable[[], str]
    csv: Callable[[], str]
    draw: Callable[[Path], None]
    algorithms: Sequence[str]


def _write_for_paper(made: _ForPaper, latex: Path | None, csv: Path | None, png: Path | None) -> list[str]:
    from tacit_lab.reports import paper

    lines = []
    if latex is not None:
        beside = latex.with_suffix(".bib")
        files.put(latex, made.latex())
        files.put(beside, paper.to_bibtex(made.algorithms))
        lines += [f"Table: {latex}, for \\usepackage{{booktabs}}", f"Methods: {beside}"]
    if csv is not None:
        files.put(csv, made.csv())
        lines.append(f"Numbers: {csv}")
    if png is not None:
        made.draw(png)
        lines.append(f"Figure: {png}")
    return lines


def _comparison(source: Path) -> _ForPaper:
    from tacit_lab import records as schema
    from tacit_lab import reports
    from tacit_lab.reports import paper

    found, _ = reports.salvage(source / RECORDS, schema.read)
    comparison = reports.compare(found)
    runs = [record for record in found if isinstance(record, schema.RunRecord)]
    return _ForPaper(
        lambda: paper.to_latex(comparison, runs, _command(source)),
        lambda: paper.to_csv(comparison),
        lambda target: paper.draw(comparison, found, target),
        [row.algorithm for row in comparison.rows],
    )


def _study(source: Path) -> _ForPaper:
    from tacit_lab.study import jobs, paper

    study = _read_study(source)
    rows, runs = study["rows"], jobs.read(source / RUNS)
    hardware = next((ended.hardware for ended in runs.values()), {})
    return _ForPaper(
        lambda: paper.to_latex(study, hardware),
        lambda: paper.to_csv(rows),
        lambda target: paper.draw(rows, study["plain"], target),
        list(dict.fromkeys(row["arm"] for row in rows)),
    )


def _write_page_of_study(source: Path, target: Path) -> list[str]:
    from tacit_lab.study import page

    study = _read_study(source)
    files.put(target, page.page(f"{study['task']}: gaps to {study['plain']}", study["rows"], study["plain"]))
    return [f"Report: {target}"]


def _read_study(source: Path) -> dict[str, Any]:
    """What is known of a study.

    Raises:
        ConfigError: it cannot be read, or no training has a partner yet.
    """
    try:
        study: dict[str, Any] = json.loads((source / STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {source / STUDY}: {error}") from error
    if not study["rows"]:
        raise ConfigError(f"{source / STUDY} holds no gap yet: call tacit study --out {source} again")
    return study


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
