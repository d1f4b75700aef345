"""The emulated cluster as a context manager: built on entry, gone on exit, whatever happens between."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tacit.environment import HUB, MEMBERS, SERVER_SECRET, SERVERS, WORKER, WORKERS
from tacit.errors import ConfigError, TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import launch, wire
from tacit_lab.testbed.churn import Churn
from tacit_lab.testbed.launch import Serving
from tacit_lab.testbed.network.nodes import INTERFACE, hostname
from tacit_lab.testbed.outputs import OnLine
from tacit_lab.testbed.results import Result
from tacit_lab.testbed.running import RunMonitor

_BUILD_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Testbed:
    """A cluster on one machine: a network namespace per node, links of a given rate between them.

    The testbed ends with the thread that enters it: the kernel is asked to kill it with that thread, so that
    not even ``kill -9`` leaves anything behind. Enter it from the main thread, or one that lives as long.
    """

    __test__ = False  # pytest would collect the name

    def __init__(self, cluster: Cluster) -> None:
        """Store what to emulate; ``local:N`` runs plain processes instead.

        Raises:
            ConfigError: it is too large to be emulated.
        """
        cluster.check_emulated()
        self.cluster = cluster
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = ""
        self._runs = 0

    @property
    def shaped(self) -> bool:
        """Whether the links have a rate or a latency."""
        return self.cluster.shaped

    @property
    def interfaces(self) -> tuple[str, ...]:
        """The name of each node's link, as programs on the node see it; none with plain local processes.

        Those of the servers' nodes are not among them.
        """
        return (INTERFACE,) * self.cluster.nodes if self.cluster.namespaces else ()

    def __enter__(self) -> Testbed:
        """Build the cluster; raises a `TestbedError` with the reason if that is not possible."""
        if self._process is not None:
            raise TestbedError("this testbed is already up; make a second Testbed for a second cluster")
        try:
            self._start()
            self._scratch = self._ready()["scratch"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tear it down."""
        self.close()

    def close(self) -> None:
        """End every process in it and wait until they are gone; again does nothing."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._scratch and not self.cluster.namespaces:  # else it is inside of them, and gone with them
            shutil.rmtree(self._scratch, ignore_errors=True)  # the supervisor was killed, perhaps

    def import_ahead(self) -> None:
        """Have what ranks of a recipe import be imported now, while the caller does something else."""
        assert self._control is not None
        wire.send(self._control, {"do": "import", "env": launch.environment(self.cluster, 0, _NOTHING)})

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = _NOTHING,
        on_line: OnLine | None = None,
        timeout: float | None = None,
        servers: Serving | None = None,
        restarts: int | None = None,
        churn: Churn | None = None,
        hold_errors: bool = False,
    ) -> Result:
        """Run a program on all nodes with torchrun, one launcher a node, and wait for all of them.

        An exception on the way, also Ctrl-C and one from `on_line`, ends the testbed.

        Args:
            argv: A script and its arguments, or ``-m``, a module and its arguments.
            env: What to add to the environment.
            on_line: Called with the node and the line for every line that is printed there, in this thread;
                without it lines go to this process's stdout and stderr.
            timeout: Seconds until everything is killed.
            servers: How to start the cluster's parameter servers, whose addresses the ranks get.
            restarts: Each rank is a worker of the servers for itself, knows of no other rank, and is started
                again up to so many times when it fails, while the others go on. None: the ranks are one
                world, and end together.
            churn: When which rank is killed or frozen, and started again; each is a world of its own, and
                gets the address of a store by which members find each other, or of hubs: the servers.
            hold_errors: Print no traceback that a rank ends by, and nothing that torchrun says of it: for
                callers that print the result's endings.
        """
        control = self._control
        if control is None:
            raise TestbedError(
                "this testbed is not up: run programs inside `with Testbed(cluster) as testbed:`"
            )
        if not argv or (argv[0] == "-m" and len(argv) < 2):
            raise ConfigError(
                f"cannot run {list(argv)!r}: write [script, *arguments] or ['-m', module, *arguments]"
            )
        if restarts is not None and self.cluster.ranks_per_node > 1:
            raise ConfigError(
                f"restarts={restarts} on {self.cluster} is not possible, as ranks of one node are started "
                f"together: use a cluster with one rank a node, such as {self.cluster.world_size}x1"
            )
        if churn is not None:
            check_churn(self.cluster)
        hub = churn is not None and bool(self.cluster.servers)
        points = [] if servers is None and not hub else launch.server_points(self.cluster, self._runs)
        run = RunMonitor(
            control,
            self.cluster.nodes,
            on_line,
            timeout,
            len(points),
            alone=restarts is not None,
            holding=hold_errors,
            ranks_per_node=self.cluster.ranks_per_node,
            saving=servers is not None and servers.checkpoint is not None,
        )
        try:
            run.relay()
            for node in range(self.cluster.nodes):
                if load := self.cluster.load_of(node):
                    run.load(node, load)
            if servers is not None:
                where = ",".join(f"{host}:{port}" for host, port in points)
                env = {**env, SERVERS: where, SERVER_SECRET: secrets.token_hex(32)}
                self._launch_servers(run, points, servers, env)
            if churn is not None:
                run.churn(churn)
                env = {**env, **(self._launch_hubs(run, points) if hub else self._launch_store(run))}
                restarts = 0
            self._launch(run, argv, env, restarts)
            return run.follow()
        except BaseException:
            self.close()  # cut off in the middle of a message, perhaps, so there is no going on
            raise
        finally:
            run.close()

    def _launch(
        self, run: RunMonitor, argv: Sequence[str], env: Mapping[str, str], restarts: int | None
    ) -> None:
        meet = launch.meeting_point(self.cluster, self._runs)
        self._runs += 1
        for node in range(self.cluster.nodes):
            command = launch.arguments(self.cluster, node, meet, self._scratch, argv, restarts)
            who = {WORKER: str(node), WORKERS: str(self.cluster.nodes)}
            self._begin(run, node, command, {**env, **({} if restarts is None else who)})

    def _launch_servers(
        self, run: RunMonitor, points: Sequence[tuple[str, int]], serving: Serving, env: Mapping[str, str]
    ) -> None:
        for number, point in enumerate(points):
            command = launch.server_arguments(self.cluster, number, point, serving)
            self._begin(run, self.cluster.nodes + number, command, {**env, "PYTHONPATH": _path()})

    def _launch_store(self, run: RunMonitor) -> dict[str, str]:
        """Start the store of members. Returns what tells them where it is."""
        point = launch.store_point(self._runs)
        env = {**os.environ, "PYTHONPATH": _path(), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        run.store({"argv": launch.store_arguments(point), "env": env})
        return {MEMBERS: f"{point[0]}:{point[1]}"}

    def _launch_hubs(self, run: RunMonitor, points: Sequence[tuple[str, int]]) -> dict[str, str]:
        """Start the hubs of members, each on a server's node. Returns what tells them where these are."""
        where = "+".join(f"{host}:{port}" for host, port in points)
        env = {HUB: where, SERVER_SECRET: secrets.token_hex(32)}
        for i, point in enumerate(points):
            command = launch.hub_arguments(point, self.cluster.nodes)
            self._begin(run, self.cluster.nodes + i, command, {**env, "PYTHONPATH": _path()})
        return env

    def _begin(self, run: RunMonitor, node: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        message = {
            "do": "start",
            "node": node,
            "host": hostname(node),
            "cwd": str(Path.cwd()),
            "argv": [*command],
            "env": launch.environment(self.cluster, node, env),
        }
        run.start(message)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(self.cluster)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tacit_lab.testbed.init", *arguments],
                env=os.environ | {"PYTHONPATH": _path()},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the command alone, which then takes all this down
            )

    def _ready(self) -> dict[str, Any]:
        assert self._control is not None
        self._control.settimeout(_BUILD_SECONDS)
        try:
            received = wire.receive(self._control)
        except TimeoutError as error:
            raise TestbedError(f"the testbed was not up after {_BUILD_SECONDS:.0f} s") from error
        self._control.settimeout(None)
        if received is None:
            raise TestbedError("the testbed ended while it was built, without saying why")
        if "error" in received[0]:
            raise TestbedError(received[0]["error"])
        return received[0]


def check_churn(cluster: Cluster) -> None:
    """Refuse a cluster whose replicas cannot come and go one by one.

    Raises:
        ConfigError: the message says what to write.
    """
    if not cluster.namespaces or cluster.ranks_per_node > 1:
        raise ConfigError(
            f"replicas of {cluster} cannot come and go, as ranks of one node are started together: use a "
            f"cluster with one rank a node, such as {cluster.world_size}x1"
        )
    if cluster.nodes < 2:
        raise ConfigError(
            f"replicas of {cluster} cannot come and go: use a cluster of 2 nodes or more, such as 6x1@100mbit"
        )


def _path() -> str:
    """A PYTHONPATH with this installation of tacit."""
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))
