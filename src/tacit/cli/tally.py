"""Run by `tacit run` around each rank of a script: what its node's interface sent.

`python tally.py FOLDER SCRIPT ARGS` runs `python -u SCRIPT ARGS`, leaves `process<r>.json` in the folder, and
ends as the script did. It stands outside of the script, so it counts for scripts that know nothing of tacit,
and for those that are killed; and it imports little, so it costs a rank some ten milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tacit import files
from tacit.lab.testbed import counters
from tacit.lab.testbed.linux import die_with_parent


def main(argv: Sequence[str]) -> int:
    """Run the script; its exit code, or the signal that ended it sent to this process too."""
    folder, *script = argv
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _ignore)
    before = _sent()
    _write(Path(folder), {"before": before, "after": None})
    process = subprocess.Popen(
        [sys.executable, "-u", *script], preexec_fn=lambda: die_with_parent(signal.SIGKILL)
    )
    code = process.wait()
    _write(Path(folder), {"before": before, "after": _sent()})
    if code < 0:
        _end_by(-code)
    return code


def _ignore(number: int, frame: FrameType | None) -> None:
    """The launcher signals the whole process group, so the script has its own copy."""


def _sent() -> int | None:
    """Bytes that this node's interface has sent since it was made; None where there is none."""
    interface = os.environ.get("TACIT_INTERFACE")
    return counters.transmitted(interface) if interface else None


def _write(folder: Path, facts: dict[str, int | None]) -> None:
    rank, node = int(os.environ.get("TACIT_WORKER", os.environ["RANK"])), int(os.environ["TACIT_NODE"])
    file = folder / f"process{rank}.json"
    with suppress(OSError):  # a rank that was started again began when its first process did
        facts["before"] = json.loads(file.read_text(encoding="utf-8"))["before"]
    with files.spared(f"the bytes of the nodes are not kept in {folder}"):
        files.put(file, json.dumps({"rank": rank, "node": node, **facts}))


def _end_by(number: int) -> None:
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # these take no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
