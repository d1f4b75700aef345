"""A process that has imported torch, and forks one for each script: imports are most of what a start costs.

    python nursery.py FD

A request on the socket is JSON, `{"argv": [...], "env": {...}}`, where argv is a script or -m and a module,
with their arguments; and the file that stdout and stderr are to be. The answer is the process's number.
Nobody here waits for it: it falls to whoever is the nearest subreaper. The socket's end is the nursery's.
"""

import gc
import json
import os
import pkgutil
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

LONGEST = 1 << 20
RANKS_NEED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.device_mesh"),
    *("torch.distributed.fsdp", "torch.distributed.tensor"),
    *("tacit.hooks", "tacit.parameter_server.transport", "tacit.transports.loopback"),
    *("pytest", "pytorch_optimizer"),
)
GPU = ("cuda", "triton")


def ready() -> None:
    """Import what ranks need, and load the compiled kernels; a process with threads could not be forked."""
    for name in RANKS_NEED:
        import_module(name)
    kernels = import_module("tacit.kernels")
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if not any(part in module.name for part in GPU):
            import_module(module.name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports"
    gc.collect()
    gc.freeze()  # else the first collection in each rank would copy what they share


def wanted(parent: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; None in the nursery, at its end, and in the fork what it is to run."""
    while True:
        data, files, _, _ = socket.recv_fds(parent, LONGEST, 1)
        if not data:
            return None
        answer, told = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                parent.close()
                os.close(answer)
                os.close(told)
                os.dup2(files[0], 1)
                os.dup2(files[0], 2)
                os.close(files[0])
                request: dict[str, Any] = json.loads(data)
                return request
            os.write(told, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        parent.send(os.read(answer, 32))
        for file in (answer, told, *files):
            os.close(file)


def run(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """As `python ARGV` would in this environment."""
    os.environ.clear()
    os.environ.update(env)
    if argv[0] == "-m":
        sys.argv = [*argv[1:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*argv]
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    ready()
    if request := wanted(socket.socket(fileno=int(sys.argv[1]))):
        run(request["argv"], request["env"])
