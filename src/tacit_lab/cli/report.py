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
) -> None:
    """Build report.html from the records in a folder; also of a run that failed, or still goes on.

    Next to it is a trace of each algorithm, traces/ALGORITHM.json, for ui.perfetto.dev or chrome://tracing,
    if the folder has timelines. E.g. tacit report tacit-out/20260101-120000-digits
    """
    source, page = parsing.path("DIR", folder), parsing.path("--out", out)
    assert source is not None
    if not os.path.isfile(source / RECORDS):  # False, and no error, if a name is too long
        raise ConfigError(f"{source} holds no {RECORDS}: give the folder that tacit compare wrote")
    for line in write(source / RECORDS, page or source / PAGE):
        typer.echo(line)


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
