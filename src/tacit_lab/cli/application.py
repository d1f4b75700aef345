"""What the command `tacit` is made of: a module or a package for each subcommand."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import distributions
from typing import Annotated

import typer

import tacit
from tacit.errors import ConfigError, TacitError
from tacit_lab.cli import certificate, diagnose, listing, plan, probe, profile, report, serve, study
from tacit_lab.cli.compare import command as compare_command
from tacit_lab.cli.interrupts import Interrupted
from tacit_lab.cli.parsing import shortened
from tacit_lab.cli.predictor import commands as predictor_commands
from tacit_lab.cli.run import command as run_command

_EPILOG = (
    "Exit codes: 0: success; 1: a run failed, or nothing can be printed; 2: the command line asks for "
    "something that is not possible; 129, 130 and 143: stopped by SIGHUP, SIGINT (Ctrl-C) and SIGTERM; of "
    "tacit run: the script's, see there."
)
app = typer.Typer(
    name="tacit",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot parse. typer exports only this subclass of it."""
app.command(name="compare", epilog=compare_command.EPILOG)(compare_command.command)
app.command(name="study")(study.command)
app.command(name="report")(report.command)
app.command(name="run", epilog=run_command.EPILOG)(run_command.command)
app.command(name="list")(listing.command)
app.command(name="probe")(probe.command)
app.command(name="profile")(profile.command)
app.command(name="diagnose")(diagnose.command)
app.command(name="plan", epilog=plan.EPILOG)(plan.command)
app.command(name="certificate")(certificate.command)
app.command(name="serve")(serve.command)
app.add_typer(predictor_commands.app, name="predictor")


def _print_version(wanted: bool) -> None:
    if wanted:
        from tacit_lab.records import Environment  # which does not load torch

        here = Environment.here()
        nccl = [f"{each.name} {each.version}" for each in distributions() if "-nccl-" in each.name]
        typer.echo(f"tacit {tacit.__version__}")
        typer.echo(
            f"torch {here.torch} with its own Gloo, {', '.join(nccl) or 'no package of NCCL'}; "
            f"Python {here.python}, kernel {here.kernel}"
        )
        raise typer.Exit


@app.callback()
def _tacit(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and those of torch, NCCL and Python, e.g. tacit --version",
        ),
    ] = False,
) -> None:
    """Data-parallel training that is fast where the network is slow. E.g. tacit compare digits."""


def run() -> int:
    """Run the command line; returns the exit code. An error that tacit raises on purpose is one line."""
    try:
        _check_folder()
        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        error.message = shortened(error.message)
        error.show()
        return 2
    except Interrupted as error:
        _print_error(str(error))
        return error.code
    except TacitError as error:
        _print_error(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        _print_error(f"what it prints cannot be written: {error.strerror}. Look at where its output goes")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter tries once more at its end
        return 1


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
