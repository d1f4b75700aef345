"""The command `tacit`. Its modules are imported when it runs, and torch when a subcommand does."""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from types import FrameType, ModuleType

__all__ = ["main"]


def main() -> None:
    """Run the command line. An error that tacit raises on purpose is one line, and never a traceback.

    What its exit codes mean stands below `tacit --help`.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stopped)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what such a terminal cannot show is no reason to fail
            stream.reconfigure(errors="replace")
    _check_library()
    try:
        application = _application()
        code = application.run()
        gc.freeze()  # or the interpreter takes a second to look for cycles in what the system frees at once
        sys.exit(code)
    finally:
        if signal.getsignal(signal.SIGINT) is _stopped:  # else one came, and later ones are ignored
            signal.signal(signal.SIGINT, before)


def _application() -> ModuleType:
    """The commands.

    Raises:
        SystemExit: the extra `cli` is not installed.
    """
    try:
        return import_module("tacit_lab.cli.application")
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"tacit: the command needs {error.name}, which the extra `cli` installs: pip install '.[cli]' in "
            "a clone of tacit, or pip install 'typer>=0.15' 'rich>=13'. The library works without it"
        )


def _check_library() -> None:
    """Refuse to run on a package `tacit` that is not ours: one on PyPI has the same name.

    Raises:
        SystemExit: what is imported as tacit is another project's, or only remnants of ours.
    """
    import tacit

    if getattr(tacit, "DISTRIBUTION", None) != "torch-tacit":
        found = ", ".join(tacit.__path__)
        sys.exit(
            f"tacit: the package `tacit` in {found} is not torch-tacit's: another project has this name on "
            "PyPI, and was installed over it or removed with files of it. Run: pip uninstall -y tacit && "
            "pip install --force-reinstall --no-deps torch-tacit"
        )


def _stopped(number: int, frame: FrameType | None) -> None:
    """End at once: where there is something to clean up, `interruptible` takes the signals."""
    os.write(2, b"tacit: stopped by SIGINT\n")
    os._exit(128 + number)
