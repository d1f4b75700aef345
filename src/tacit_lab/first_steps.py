"""Runs a user's script on an emulated cluster until its first steps have written a requested file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tacit.errors import TestbedError
from tacit_lab.testbed import Testbed

_SECONDS = 1200.0


def run_until_written(
    bed: Testbed,
    words: Sequence[str],
    variables: Callable[[Path], Mapping[str, str]],
    otherwise: str,
    on_line: Callable[[int, str], None] | None = None,
) -> str:
    """Run the script. Returns the text that its session writes before it ends the script.

    Args:
        bed: where it runs; it is up.
        words: the script and its arguments, as for torchrun.
        variables: the environment variables for a path of the file.
        otherwise: the error's text if there is no file: what the script must do.
        on_line: takes what the ranks print.

    Raises:
        TestbedError: the script has ended without writing it.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "written.json"
        result = bed.run(words, env=variables(out), on_line=on_line, timeout=_SECONDS)
        if not out.exists():
            raise TestbedError(f"the script has ended with code {result.returncode}, and {otherwise}")
        return out.read_text()
