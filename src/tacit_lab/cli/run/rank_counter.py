"""Run by `tacit run` around each rank of a script: counts the bytes that the node's interface sends.

`python rank_counter.py FOLDER SCRIPT ARGS` runs `python -u SCRIPT ARGS`, writes `process<rank>.json` into the
folder, and ends as the script did. It is a separate process, so it also counts for scripts that do not use
tacit, and for those that are killed. It imports little, so that it costs a rank some ten milliseconds.
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
from typing import Any

from tacit import files
from tacit.environment import HUB, INTERFACE, MEMBERS, NODE, WORKER
from tacit_lab.testbed.network import counters, peers
from tacit_lab.testbed.network.linux import die_with_parent

_OFTEN = 1.0
"""Seconds between two counts of a replica that may be killed at any time, with this process."""


def main(argv: Sequence[str]) -> int:
    """Run the script. Returns its exit code, or ends this process by the signal that ended the script."""
    folder, *script = argv
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _ignore)
    before = _sent_bytes()
    exchanged = _exchanged()
    _write(Path(folder), {"before": before, "after": None, "exchanged_before": exchanged})
    process = subprocess.Popen(
        [sys.executable, "-u", *script], preexec_fn=lambda: die_with_parent(signal.SIGKILL)
    )
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_OFTEN if {MEMBERS, HUB} & {*os.environ} else None)
        now = {"after": _sent_bytes(), "exchanged_after": _exchanged()}
        _write(Path(folder), {"before": before, "exchanged_before": exchanged, **now})
    if code < 0:
        _end_by_signal(-code)
    return code


def _ignore(number: int, frame: FrameType | None) -> None:
    """The launcher signals the whole process group, so the script gets the signal, too."""


def _sent_bytes() -> int | None:
    """Bytes that this node's interface has sent since it was made; None if the node has no interface."""
    interface = os.environ.get(INTERFACE)
    return counters.transmitted(interface) if interface else None


def _exchanged() -> peers.PeerBytes | None:
    """What it has exchanged with each other node; None where that is not counted."""
    return peers.read() if os.environ.get(INTERFACE) else None


def _write(folder: Path, counts: dict[str, Any]) -> None:
    rank, node = int(os.environ.get(WORKER, os.environ["RANK"])), int(os.environ[NODE])
    file = folder / f"process{rank}.json"
    with suppress(OSError):  # of a rank that was started again: count from its first start
        first = json.loads(file.read_text(encoding="utf-8"))
        counts |= {key: first[key] for key in ("before", "exchanged_before") if key in first}
    with files.spared(f"the bytes of the nodes are not saved in {folder}"):
        files.put(file, json.dumps({"rank": rank, "node": node, **counts}))


def _end_by_signal(number: int) -> None:
    if number not in (signal.SIGKILL, signal.SIGSTOP):  # these two cannot have a handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
