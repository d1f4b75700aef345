"""`tacit report`: build the page of a comparison from its records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tacit.errors import ConfigError

__all__ = ["PAGE", "command", "write"]

PAGE = "report.html"
RECORDS = "records.jsonl"


def command(
    folder: Annotated[
        Path, typer.Argument(help="The folder that tacit compare wrote, e.g. my-run", metavar="DIR")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the page; by default DIR/report.html, e.g. page.html"),
    ] = None,
) -> None:
    """Build report.html from the records in a folder; also of a run that failed, or still goes on.

    E.g. tacit report tacit-out/20260101-120000-digits
    """
    if not (folder / RECORDS).is_file():
        raise ConfigError(f"{folder} holds no {RECORDS}: give the folder that tacit compare wrote")
    target = out or folder / PAGE
    write(folder / RECORDS, target)
    typer.echo(f"Report: {target}")


def write(records: Path, target: Path) -> None:
    """Build the page from a file of records and put it in place at once.

    Raises:
        ConfigError: There is nothing to show, or the page cannot be written.
    """
    from tacit import reports

    found, cut = reports.salvage(records)
    text = reports.page(found, cut=cut)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # An error message may hold bytes of a file name that are no text.
        draft.write_text(text, encoding="utf-8", errors="replace")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
