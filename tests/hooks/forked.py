"""Python processes that are forked from one that has imported torch, for tests that start many."""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

NURSERY = Path(__file__).resolve().with_name("nursery.py")
WARNINGS = "error::FutureWarning,error::DeprecationWarning"
_PR_SET_CHILD_SUBREAPER = 36
_C2PWRITE = 13
"""Which argument of `_execute_child` is the pipe that the child writes to."""


_LOCK = Lock()


class Forked(subprocess.Popen[str]):
    """As `subprocess.Popen` of this interpreter, with its output as text in one pipe; Linux only.

    What a process of its own has and a fork has not is a hash seed of its own, as it is that of the nursery.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._request = json.dumps({"argv": [*argv], "env": {**env}}).encode()
        super().__init__([*argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _execute_child(
        self, *given: Any
    ) -> None:  # the one place where Popen starts what it then looks after
        out = given[_C2PWRITE]
        with _LOCK:  # tests start processes in threads
            nursery = _nursery()
            _adopt(True)
            try:
                socket.send_fds(nursery, [self._request], [out])
                told = nursery.recv(32)
            finally:
                _adopt(False)
        if not told:
            raise RuntimeError("the nursery is gone: what it printed last says why")
        self.pid = int(told)
        self._child_created = True
        os.close(out)
        self._closed_child_pipe_fds = True


@functools.cache
def _nursery() -> socket.socket:
    """Of this process; it ends with it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": WARNINGS}
    process = subprocess.Popen(
        [sys.executable, str(NURSERY), str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()]
    )
    theirs.close()

    def over() -> None:
        mine.close()
        process.wait()

    atexit.register(over)
    return mine


def _adopt(orphans: bool) -> None:
    """Become, or cease to be, the parent of what loses its own below this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
