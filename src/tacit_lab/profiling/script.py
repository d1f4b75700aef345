"""Profiles a user's training script: `python -m tacit_lab.profiling.script SCRIPT ARGS`.

It runs the script in this process, as Python would. `tacit run --profile` starts it for each rank, and says
by an environment variable into which folder the profile is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tacit import files, scripts
from tacit.environment import PROFILE, WORKER
from tacit_lab.profiling.recorder import ProfileRecorder


def main(words: Sequence[str]) -> None:
    """Run a script, or `-m` and a module; its profile is written however it ends."""
    folder = Path(os.environ.pop(PROFILE))
    rank = int(os.environ.get(WORKER, os.environ.get("RANK", "0")))
    recorder = ProfileRecorder()
    recorder.instrument()
    try:
        with recorder.watching():
            scripts.run(words)
    finally:
        profile = recorder.profile(rank)
        if profile is not None:
            with files.spared(f"the profile is not saved in {folder}"):
                files.put(folder / f"profile{rank}.json", profile.to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
