"""tacit's command, as the tests of servers give it."""

import os
import subprocess
import sys
from pathlib import Path

TACIT = [sys.executable, "-m", "tacit.cli"]


def tacit(*words: str, cwd: Path, seconds: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TACIT, *words], capture_output=True, text=True, timeout=seconds, cwd=cwd, env=os.environ | {}
    )
