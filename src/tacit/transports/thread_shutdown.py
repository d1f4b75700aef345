"""Waits, at the end of a process, for threads that torch does not wait for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_POLL = 0.005


def settle(limit: float = 0.5) -> bool:
    """Wait until no other thread of this process is runnable in two checks; at most `limit` seconds.

    A thread of Gloo takes the interpreter's lock once more after its last callback. On a busy machine that
    may happen after the interpreter has exited, and then it aborts the process; a group that a DDP object
    keeps alive has such threads to the end. It works on Linux only: elsewhere it does not wait.

    Returns:
        Whether all other threads are idle.
    """
    if not _TASKS.is_dir():
        return True
    mine, end, still = str(threading.get_native_id()), time.monotonic() + limit, 0
    while still < 2 and time.monotonic() < end:
        time.sleep(_POLL)  # which releases the interpreter's lock
        still = 0 if any(_runs(task) for task in os.listdir(_TASKS) if task != mine) else still + 1
    return still == 2


def _runs(task: str) -> bool:
    try:
        stat = (_TASKS / task / "stat").read_text()
    except OSError:  # it has ended
        return False
    return stat.rpartition(")")[2].split()[0] == "R"
