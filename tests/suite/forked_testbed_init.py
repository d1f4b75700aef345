"""The first process of a testbed whose launchers and ranks are forks, in place of `tacit_lab.testbed.init`.

It is run in a fork of the fork server, so that torch is imported; launchers are forked from it, as ever where
torch is. Each launcher forks a fork server of its own before it begins, and this one forks the keepers of
ranks (`tacit_lab.testbed.rank`). Ranks and servers are forked in place of exec. All of them have the parents,
sessions, pipes and command lines that they have otherwise. The variable FRESH names ranks that are
interpreters of their own nevertheless.
"""

import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import fork_server
import forks
from tacit_lab.cli.run import rank_counter
from tacit_lab.testbed import init, rank

FRESH = os.environ.pop("FRESH", "").split(",")
LEVEL = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
WARNING, ERROR = 1, 2
READ_AT_ONCE = ("KMP_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHONHASHSEED")
READ_AT_ONCE += ("LOGLEVEL", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES")
"""How variables begin that are read by what the fork server has imported."""
WITHOUT_TORCH = ["-u", rank_counter.__file__]
SERVER = ["-u", "-m", "tacit.stores.server"]
_main, _execve = torchrun.main, os.execve


def launch() -> None:
    """What a launcher does; quietly, by variables that torch has read while it was imported."""
    LEVEL.value = ERROR
    for name, each in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed") and isinstance(each, logging.Logger):
            each.setLevel(os.environ["LOGLEVEL"])
    forks.use_a_fork(lambda request: os._exit(keep(request)))
    subprocess_handler.Popen = forks.Fork  # type: ignore[misc]
    _main()


def keep(request: dict[str, Any]) -> int:
    """Be the keeper of a rank; its exit code."""
    script = request["argv"].index(rank.__file__)
    os.environ.clear()
    os.environ.update(request["env"])
    fork_server.rename([sys.executable, *request["argv"]])
    command, env = request["argv"][script + 1 :], rank.environment()
    if os.environ["RANK"] in FRESH or _read(env) != _read_by_the_fork_server():
        return rank.main(command)
    return rank.keep(lambda: become(command, env))


def _read(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the rank that a new interpreter would read while it imports."""
    return {name: value for name, value in env.items() if name.startswith(READ_AT_ONCE)}


def _read_by_the_fork_server() -> dict[str, str]:
    """The system goes on telling the environment that the fork server was begun with."""
    began = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(each).partition("=") for each in began)
    return {name: value for name, _, value in pairs if name.startswith(READ_AT_ONCE)}


class Rank(subprocess.Popen[bytes]):
    """A fork of its parent that is as a new interpreter would be."""

    def _execute_child(self, *given: Any) -> None:
        told = forks.given_to_execute(given)
        self.pid = os.fork()
        if self.pid == 0:
            for number, pipe in enumerate((told["c2pwrite"], told["errwrite"]), 1):
                if pipe >= 0:
                    os.dup2(pipe, number)
            told["preexec_fn"]()
            become(told["args"], os.environ if told["env"] is None else told["env"])
        self._child_created = True
        forks.close_pipes(self, told)


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Go on as a new interpreter with this command line would."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if [*argv[1:3]] == WITHOUT_TORCH:
        fork_server.rename(argv)
        environ = dict(env)
        os.environ.clear()
        os.environ.update(environ)
        rank_counter.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Rank})  # type: ignore[assignment]
        code = rank_counter.main(argv[3:])
        sys.stderr.flush()
        os._exit(code)
    LEVEL.value = WARNING
    random.seed()
    np.random.seed()
    fork_server.leave(fork_server.run(argv[1:], env))


def execve(path: str, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Servers are forks too."""
    if [*argv[1:4]] == SERVER:
        become(argv, env)
    _execve(path, argv, env)


if __name__ == "__main__":
    torchrun.main, os.execve = launch, execve  # type: ignore[assignment]
    os._exit(init.main(sys.argv[1:]))
