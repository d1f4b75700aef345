"""The command `tacit`: a module or a package for each subcommand. torch is imported when one runs."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from tacit.cli import diagnose, listing, plan, probe, profile, report
from tacit.cli.compare import command as compare_command
from tacit.cli.interrupts import Interrupted
from tacit.cli.parsing import shortened
from tacit.cli.predictor import commands as predictor_commands
from tacit.cli.run import command as run_command
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
"""What typer raises for a command line that it cannot parse. typer exports only this subclass of it."""
app.command(name="compare", epilog=compare_command.EPILOG)(compare_command.command)
app.command(name="report")(report.command)
app.command(name="run", epilog=run_command.EPILOG)(run_command.command)
app.command(name="list")(listing.command)
app.command(name="probe")(probe.command)
app.command(name="profile")(profile.command)
app.command(name="diagnose")(diagnose.command)
app.command(name="plan", epilog=plan.EPILOG)(plan.command)
app.add_typer(predictor_commands.app, name="predictor")


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
    """Run the command line. An error that tacit raises on purpose is one line, and never a traceback.

    Exit codes: 0: success; 1: a run failed; 2: the command line asks for something that is not possible; 129,
    130 and 143: stopped by SIGHUP, SIGINT (Ctrl-C) and SIGTERM; of tacit run: the script's own, see there.
    """
    try:
        _check_folder()
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _UsageError as error:
        error.message = shortened(error.message)
        error.show()
        sys.exit(2)
    except Interrupted as error:
        _print_error(str(error))
        sys.exit(error.code)
    except TacitError as error:
        _print_error(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _check_folder() -> None:
    """Relative paths start at the current folder, so it must exist."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the folder that this was started in is gone: change to one that is there"
        ) from error


def _print_error(message: str) -> None:
    typer.secho(shortened(f"tacit: {message}"), err=True, fg=typer.colors.RED)
