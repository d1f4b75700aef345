"""Python processes that are forked from one that has imported torch, for tests that start many."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import fork_server

WARNINGS = "error::FutureWarning,error::DeprecationWarning"
_PR_SET_CHILD_SUBREAPER = 36
_ROOM = "x" * 8000
_LOCK = Lock()
_SERVERS: list[socket.socket] = []
"""That of this process, once there is one."""


class Fork(subprocess.Popen[Any]):
    """As `subprocess.Popen` of this interpreter, with the arguments that are used here; Linux only.

    What a process of its own has and a fork has not is a hash seed of its own: it has the fork server's.
    """

    def _execute_child(self, *given: Any) -> None:
        # The one place where Popen starts what it then looks after.
        told = given_to_execute(given)
        pipes = (told["p2cread"], told["c2pwrite"], told["errwrite"])
        kept = [*told["pass_fds"]]
        request = {
            "argv": [*map(str, told["args"][1:])],
            "env": {**(os.environ if told["env"] is None else told["env"])},
            "cwd": str(told["cwd"] or os.getcwd()),
            "session": told["start_new_session"],
            "files": [0, 1, 2, *kept],
        }
        files = [own if pipe < 0 else pipe for own, pipe in enumerate(pipes)] + kept
        with _LOCK:  # tests start processes in threads
            home = _server()
            _adopt(True)
            try:
                socket.send_fds(home, [json.dumps(request).encode()], files)
                number = home.recv(32)
            finally:
                _adopt(False)
        if not number:
            raise RuntimeError("the fork server is gone: what it printed last says why")
        self.pid = int(number)
        self._child_created = True
        close_pipes(self, told)


COMMAND = str(Path(__file__).with_name("forked_command.py"))
"""Behind it comes `torchrun` or `tacit`, and its words: a command whose processes are all forks."""


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code, and what it and the processes that it started printed."""

    code: int
    out: str
    err: str


def ran(*words: str, cwd: Path | None = None, seconds: float = 500, fresh: bool = False, **env: str) -> Done:
    """As `python WORDS` with these variables besides, to its end; a fork, or a `fresh` interpreter."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    kind: Any = subprocess.Popen if fresh else Fork
    with kind([sys.executable, *words], env=os.environ | env, cwd=cwd, text=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


def given_to_execute(given: Sequence[Any]) -> dict[str, Any]:
    """What `Popen._execute_child` was given, by name."""
    names = [*inspect.signature(subprocess.Popen._execute_child).parameters][1:]  # type: ignore[attr-defined]
    return dict(zip(names, given, strict=True))


def close_pipes(process: subprocess.Popen[Any], told: Mapping[str, Any]) -> None:
    """Close the child's ends of the pipes, which it has now."""
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(told[end] for end in ends))  # type: ignore[attr-defined]


def use_a_fork(then: Callable[[dict[str, Any]], object]) -> None:
    """From now on this process's forks are made by one of itself, which has no threads yet.

    Args:
        then: what a fork does with the request; it does not return.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        mine.close()
        request = fork_server.wanted(theirs)
        if request is not None:
            then(request)
        os._exit(0)
    theirs.close()
    _SERVERS[:] = [mine]


def _server() -> socket.socket:
    """Of this process; it ends with it."""
    if not _SERVERS:
        _SERVERS.append(_begun())
    return _SERVERS[0]


def _begun() -> socket.socket:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": WARNINGS}
    process = subprocess.Popen(
        [sys.executable, fork_server.__file__, str(theirs.fileno()), _ROOM],
        env=env,
        pass_fds=[theirs.fileno()],
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
