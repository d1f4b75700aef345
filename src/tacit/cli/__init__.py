"""The command `tacit`: one file for each subcommand. torch and rich are imported when a command runs."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from tacit.cli import compare, listing, predictor, report, run
from tacit.cli.interrupts import Interrupted
from tacit.cli.texts import clipped
from tacit.errors import ConfigError, TacitError

__all__ = ["app", "main"]

app = typer.Typer(
    name="tacit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read; it exports this one of its kinds alone."""
app.command(name="compare", epilog=compare.EPILOG)(compare.command)
app.command(name="report")(report.command)
app.command(name="run", epilog=run.EPILOG)(run.command)
app.command(name="list")(listing.command)
app.add_typer(predictor.app, name="predictor")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tacit {version('tacit')}")
        raise typer.Exit


@app.callback()
def _tacit(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, e.g. tacit --version",
        ),
    ] = False,
) -> None:
    """Data-parallel training that is fast where the network is slow. E.g. tacit compare digits."""


def main() -> None:
    """Run the command line; errors that tacit raises on purpose are one line, and never a traceback.

    Exit codes: 0: all is done; 1: a run failed; 2: what was asked for cannot be; 129, 130 and 143: stopped by
    SIGHUP, SIGINT (Ctrl-C) and SIGTERM; of tacit run: the script's own, see there.
    """
    try:
        _check_folder()
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _UsageError as error:
        error.message = clipped(error.message)
        error.show()
        sys.exit(2)
    except Interrupted as error:
        _complain(str(error))
        sys.exit(error.code)
    except TacitError as error:
        _complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _check_folder() -> None:
    """All paths are taken from the folder that the command was started in."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the folder that this was started in is gone: change to one that is there"
        ) from error


def _complain(message: str) -> None:
    typer.secho(clipped(f"tacit: {message}"), err=True, fg=typer.colors.RED)
