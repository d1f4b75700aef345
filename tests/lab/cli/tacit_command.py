"""tacit's command, as the tests of servers give it."""

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

from in_process_command import called

TACIT = [sys.executable, "-m", "tacit_lab"]


def tacit(
    *words: str, cwd: Path, seconds: float = 500, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """In this folder; in a `fresh` process, or in this one with forks for servers and ranks."""
    if not fresh:
        with chdir(cwd):
            done = called(*words)
        return subprocess.CompletedProcess(["tacit", *words], done.code, done.out, done.err)
    return subprocess.run(
        [*TACIT, *words], capture_output=True, text=True, timeout=seconds, cwd=cwd, env=os.environ | {}
    )
