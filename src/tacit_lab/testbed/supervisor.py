"""The process above the launchers: starts, signals and reaps them, and lets nothing survive."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tacit_lab.testbed import rank, wire
from tacit_lab.testbed.network import background, links, relay
from tacit_lab.testbed.network.linux import Clone, die_with_parent, join, name_thread, unshare

_LAUNCHER = "torch.distributed.run"
_WORKER = "tacit_lab.recipes.worker"
_SLOW = ("torch._dynamo", _WORKER)
"""What each rank of a recipe would import, in two seconds of a processor; optimizers import dynamo."""
_STORE = "the store of the members"
_RELAY = "the relay that makes packets late"


class Supervisor:
    """Serves the command on the other side of a socket until that side is gone."""

    def __init__(
        self, control: socket.socket, networks: Sequence[int] = (), late: relay.Relay | None = None
    ) -> None:
        """Serve this socket.

        Args:
            control: The socket.
            networks: The network namespace of each node, as open files; empty without namespaces.
            late: What delays the packets between them, in a process of its own while programs run.
        """
        self._control = control
        self._networks, self._relay = networks, late
        self._launchers: dict[int, int] = {}  # node by process
        self._struck: dict[int, Sequence[int]] = {}  # what was below a launcher when it was killed
        self._ended: dict[int, tuple[int, Sequence[int]]] = {}  # code, and what must end too, by node
        self._beside: dict[int, str] = {}  # what else has to run, by process
        self._sink: socket.socket | None = None
        self._launched = False
        self._wakeup, wake = os.pipe()
        for end in (self._wakeup, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def serve(self) -> None:
        """Obey the command until it is gone; then end all processes."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, self._obey)
            selector.register(self._wakeup, selectors.EVENT_READ, self._woken)
            while all(key.data() for key, _ in selector.select()):
                pass
        self.sweep()

    def sweep(self) -> None:
        """Kill every process below this one, also those that left their parents."""
        while self._reap():
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)

    def _obey(self) -> bool:
        received = wire.receive(self._control)
        if received is None:
            return False
        message, files = received
        if message["do"] == "start":
            self._start(message, files)
        elif message["do"] == "import":
            _import(message["env"], for_recipes=True)
        elif message["do"] == "load":
            self._start_load(message["node"], message["rate"])
        elif message["do"] == "relay":
            self._start_relay()
        elif message["do"] == "store":
            self._start_store(message)
        elif message["do"] == "strike":
            self._strike(message["node"], message["signal"])
        elif message["do"] == "signal":
            self._signal(message["node"], message["signal"])
        else:
            self.sweep()
            self._tell({"swept": True})
        for file in files:
            os.close(file)
        return True

    def _woken(self) -> bool:
        numbers = os.read(self._wakeup, 4096)
        self._reap()
        return signal.SIGTERM not in numbers

    def _reap(self) -> bool:
        """Collect what has ended; whether any child is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                node = self._launchers.pop(ended[0], None)
                code = os.waitstatus_to_exitcode(ended[1])
                if node is not None:
                    self._ended[node] = code, self._struck.pop(ended[0], ())
                elif (what := self._beside.pop(ended[0], None)) is not None:
                    relayed = self._relay.told() if self._relay is not None and what == _RELAY else None
                    self._tell({"lost": what, "code": code, "relayed": relayed})
        except ChildProcessError:
            return False
        finally:
            self._tell_ended()
        return True

    def _tell_ended(self) -> None:
        """Tell of launchers that have ended, when what was killed with them has closed its sockets, too."""
        for node, (code, others) in [*self._ended.items()]:
            if not any(map(_exists, others)):
                del self._ended[node]
                self._tell({"ended": node, "code": code})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the command is gone, and serve() will see it
            wire.send(self._control, message)

    def _signal(self, node: int, number: int) -> None:
        for process, its_node in self._launchers.items():
            if its_node == node:
                os.kill(process, number)

    def _strike(self, node: int, number: int) -> None:
        """Send a signal to all processes of a node."""
        for launcher in [process for process, its_node in self._launchers.items() if its_node == node]:
            below = self._struck[launcher] = _below(launcher)
            for process in [launcher, *below]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def _start_store(self, message: Mapping[str, Any]) -> None:
        """Run the store of members beside the nodes, where none of them takes it away."""
        if self._networks:
            links.address_switch()

        def serve() -> NoReturn:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.execve(message["argv"][0], message["argv"], message["env"])

        self._start_beside(_STORE, "tacit-store", serve)

    def _start(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        if _launches(message["argv"]):
            recipe = _trains_a_recipe(message["argv"])
            if len(self._networks) > 1 or self._launched or recipe:
                _import(message["env"], recipe)
            self._launched = True
        process = os.fork()
        if process == 0:
            self._become(message, files)
        self._launchers[process] = message["node"]

    def _start_load(self, node: int, rate: float) -> None:
        """Have a process send out of a node until all are ended."""
        if self._sink is None:
            self._sink = background.sink()  # this process's own network is the switch

        def send() -> NoReturn:
            join(self._networks[node], Clone.NETWORK)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            background.send_at(rate)

        self._start_beside(f"the background load of node {node}", background.NAME, send)

    def _start_relay(self) -> None:
        """Have a process delay packets until all are ended, if that is to be done."""
        if self._relay is not None:
            self._start_beside(_RELAY, relay.NAME, self._relay.carry)

    def _start_beside(self, what: str, name: str, work: Callable[[], NoReturn]) -> None:
        process = os.fork()
        if process:
            self._beside[process] = what
            return
        try:
            _reset_signals()
            die_with_parent(signal.SIGKILL)
            name_thread(name)
            work()
        except BaseException as error:
            sys.stderr.write(f"{what} ended: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _become(self, message: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
        """In the child: turn into the launcher of a node."""
        try:
            _reset_signals()
            die_with_parent(signal.SIGKILL)
            os.setsid()
            if self._networks:
                _enter(self._networks[message["node"]], message["host"])
            for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
                os.dup2(source, target)
            os.chdir(message["cwd"])
            if _LAUNCHER in sys.modules and _launches(message["argv"]):
                os._exit(_launch(message["argv"], message["env"]))
            os.execve(message["argv"][0], message["argv"], message["env"])
        except BaseException as error:
            os.write(files[1], f"cannot start {message['argv'][0]}: {error}\n".encode())
        finally:
            os._exit(127)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _launches(argv: Sequence[str]) -> bool:
    return [*argv[:3]] == [sys.executable, "-m", _LAUNCHER]


def _trains_a_recipe(argv: Sequence[str]) -> bool:
    """Whether the ranks run the module of the recipes, which can be imported once for all of them."""
    return ("-m", _WORKER) in itertools.pairwise(argv)


def _import(env: Mapping[str, str], for_recipes: bool) -> None:
    """Once for all nodes: to import torch is most of what a launcher costs, in time and in memory."""
    wanted = [_LAUNCHER, *(_SLOW if for_recipes else ())]
    if all(name in sys.modules for name in wanted):
        return
    before = dict(os.environ)
    os.environ.update(env)  # how much torch says is read while it is imported
    with contextlib.suppress(Exception):  # a launcher or rank of its own then says what is wrong
        for name in wanted:
            importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)
    gc.collect()
    gc.freeze()  # else the first collection in each launcher would copy what they share


def _launch(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command line in this process. Returns its exit code."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [*argv[2:]]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        if _WORKER in sys.modules and _trains_a_recipe(argv):
            _launch_forks(argv)
        else:
            sys.modules[_LAUNCHER].main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _launch_forks(argv: Sequence[str]) -> None:
    """Do as torchrun with this command line, but with ranks that are forks of this process."""
    torchrun = sys.modules[_LAUNCHER]
    config, _, command = torchrun.config_from_args(torchrun.parse_args(argv[3:]))
    config.start_method = "fork"
    torchrun.elastic_launch(config, _watch_fork)(command[command.index(_WORKER) + 1 :])


def _watch_fork(arguments: Sequence[str]) -> None:
    """In a process that the launcher has forked: fork a rank of a recipe, and end as it does."""

    def become() -> None:
        environment = rank.environment()
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as where Python begins: a closed socket is an error
        name_thread(f"tacit rank {environment['RANK']}")  # its command line is that of the testbed
        sys.modules[_WORKER].main(arguments)

    if code := rank.keep(become, alone=True):
        os._exit(code)


def _enter(network: int, host: str) -> None:
    join(network, Clone.NETWORK)
    unshare(Clone.UTS)
    socket.sethostname(host)


def _below(process: int) -> list[int]:
    """All processes below one, parents first."""
    found = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, children.read_text().split()):
                found += [child, *_below(child)]
    return found


def _children() -> list[int]:
    """The processes whose parent this one is."""
    own = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in the second field may hold anything, also spaces and brackets.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == own:
                    found.append(int(entry.name))
    return found
