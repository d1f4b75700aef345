"""Runs a user's script on an emulated cluster until its first steps have told what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed

__all__ = ["told"]

_SECONDS = 1200.0


def told(
    cluster: Cluster,
    words: Sequence[str],
    variables: Callable[[Path], Mapping[str, str]],
    otherwise: str,
    on_line: Callable[[int, str], None] | None = None,
) -> str:
    """The file that the script's session writes before it ends the script.

    Args:
        words: the script and its arguments, as for torchrun.
        variables: of the environment, by the file's path.
        otherwise: what is missing where there is no file, and what the script must do.
        on_line: takes what the ranks print.

    Raises:
        TestbedError: the script has ended without it.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "told.json"
        with Testbed(cluster) as bed:
            result = bed.run(words, env=variables(out), on_line=on_line, timeout=_SECONDS)
        if not out.exists():
            raise TestbedError(f"the script has ended with code {result.returncode}, and {otherwise}")
        return out.read_text()
