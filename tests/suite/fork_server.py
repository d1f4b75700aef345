"""A process that has imported torch, and forks one for each script: imports are most of what a start costs.

    python fork_server.py FD ROOM

A request on the socket is JSON: `argv`, as behind `python` on a command line; `env` and `cwd`; `session`,
whether the process begins one of its own; and `files`, which numbers the open files beside the request are to
have. The answer is the process's number. Nobody here waits for it: it falls to whoever is the nearest
subreaper. It ends with the socket. ROOM is there to be overwritten by the command lines of forks.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

LONGEST = 1 << 20
RANKS_NEED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.device_mesh"),
    *("torch.distributed.run", "torch.utils.tensorboard", "sklearn.datasets"),
    *("torch.distributed.fsdp", "torch.distributed.tensor"),
    *("tacit.api.attach", "tacit.api.comm_hook"),
    *("tacit.stores.client.transport", "tacit.transports.loopback"),
    *("tacit_lab.cli.compare.command", "tacit_lab.cli.run.command", "tacit_lab.recipes.worker"),
    *("tacit_lab.testbed.init", "tacit_lab.testbed.network.links", "tacit_lab.testbed.network.namespaces"),
    *("pytest", "pytorch_optimizer"),
)
GPU = ("cuda", "triton")
FIRST_FREE = 1000
TAKEN_DOWN = "MODULES_ARE_TAKEN_DOWN"
"""Set for one rank of each launch of checks, for what goes wrong at the very end."""
HUGE = 1 << 21
MADV_COLLAPSE = 25


def ready() -> None:
    """Import what ranks need, and load the compiled kernels; a process with threads could not be forked."""
    gc.disable()  # it would find nothing in what is imported
    for name in RANKS_NEED:
        import_module(name)
    kernels = import_module("tacit.kernels")
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if not any(part in module.name for part in GPU):
            import_module(module.name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports"
    gc.enable()
    gc.collect()
    gc.freeze()  # else the first collection in each rank would copy what they share
    for each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        each.atexit = False  # numba's, of each compiled function: a third of what a fork takes
    _collapse()


def _collapse() -> None:
    """Put memory into huge pages, as far as the kernel can: a fork copies one entry for 512."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(each, 16) for each in place.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def wanted(parent: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; None in the fork server, at its end, and in the fork what it is to run."""
    while True:
        data, files, _, _ = socket.recv_fds(parent, LONGEST, 16)
        if not data:
            return None
        answer, told = os.pipe()
        if os.fork() == 0:
            between = os.getpid()
            child = os.fork()
            if child == 0:
                while os.getppid() == between:  # what asks for its parent is not to see this one
                    time.sleep(0.0002)
                for file in (parent.detach(), answer, told):
                    os.close(file)
                request: dict[str, Any] = json.loads(data)
                _begin(request, files)
                return request
            os.write(told, str(child).encode())
            os._exit(0)
        os.wait()
        parent.send(os.read(answer, 32))
        for file in (answer, told, *files):
            os.close(file)


def _begin(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """The files, the folder and the session of a process that was asked for."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE) for file in files]
    for file in files:
        os.close(file)
    for source, target in zip(aside, request["files"], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()


def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Do as `python ARGV` would in this environment; its exit code."""
    options, words = [], [*argv]
    while words[0].startswith("-") and words[0] != "-m":
        options.append(words.pop(0))
    assert {*options} <= {"-u", "-P"}, options
    rename([sys.executable, *argv])
    environ = dict(env)
    os.environ.clear()
    os.environ.update(environ)
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    del sys.path[0]  # the folder of this file
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    _warn_as(env)
    if "-u" in options:
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = TextIOWrapper(FileIO(number, "w", closefd=False), write_through=True)
            stream.reconfigure(encoding="utf-8", errors="strict" if name == "stdout" else "backslashreplace")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[:0] = [] if "-P" in options else [os.getcwd()]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            main.__dict__.update(__file__=words[0], __loader__=SourceFileLoader("__main__", words[0]))
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        error.__traceback__ = _from_the_script_on(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def finish(code: int) -> NoReturn:
    """End the interpreter as it ends by itself, wherever this is called from."""
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("it has ended")


def leave(code: int) -> NoReturn:
    """As `finish`, but modules are not taken down: that costs more than what most processes do.

    Threads are waited for, what was registered for the exit is called, and the script's objects are given up.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    with suppress(OSError, ValueError):  # an interpreter says what it could not write
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finish(code)


def rename(argv: Sequence[str]) -> None:
    """What the system tells as this process's command line; that of the fork server has room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(os.fsencode(word) for word in argv)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _warn_as(env: Mapping[str, str]) -> None:
    """The fork server's own PYTHONWARNINGS, two errors, are not those of a process that has none."""
    if not env.get("PYTHONWARNINGS"):
        plain = [
            each
            for each in warnings.filters
            if each[0] != "error" or each[2] not in (FutureWarning, DeprecationWarning)
        ]
        warnings.filters[:] = plain  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _from_the_script_on(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this file and of runpy, where any are left: a new interpreter has none."""
    first = trace
    while first and first.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        first = first.tb_next
    return first or trace


if __name__ == "__main__":
    ready()
    if request := wanted(socket.socket(fileno=int(sys.argv[1]))):
        whole = request["env"].pop(TAKEN_DOWN, "")
        (finish if whole else leave)(run(request["argv"], request["env"]))
