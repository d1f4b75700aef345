"""The command line of a node's launcher, torchrun, and the environment of its ranks."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tacit import environment as variables
from tacit_lab.cluster import Cluster
from tacit_lab.testbed.network.nodes import INTERFACE, SWITCH, address
from tacit_lab.testbed.rank import MARK

_FIRST_PORT = 29500
_FIRST_SERVER_PORT = 40000  # one for each server of each run
_FIRST_STORE_PORT = 29400
_FREE_PORTS = range(15000, 32000)
_RANK = Path(__file__).with_name("rank.py")

# Variables of an outer torchrun would otherwise be taken for the testbed's.
_STALE = ("PET_", "TORCHELASTIC_")
_STALE_NAMES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", variables.INTERFACE, variables.SERVERS, variables.SERVER_SECRET),
    *(variables.SERVER_SECRET_FILE, variables.WORKER, variables.WORKERS, variables.MEMBERS, variables.HUB),
    *(variables.TLS, variables.TLS_CERTIFICATE, variables.TLS_KEY),
}


def meeting_point(cluster: Cluster, run: int) -> tuple[str, int]:
    """Address and port of the rendezvous of one run's launchers."""
    return (address(0), _FIRST_PORT + run) if cluster.namespaces else ("127.0.0.1", free_port())


def free_port() -> int:
    """A free port of this host, for a process that is about to start.

    It is below the system's ephemeral ports (32768 and above), of which another process could get one before.
    Two concurrent calls are unlikely to return the same.
    """
    while True:
        port = secrets.choice(_FREE_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def server_points(cluster: Cluster, run: int) -> list[tuple[str, int]]:
    """Address and port of each parameter server of one run."""
    if not cluster.namespaces:
        return [("127.0.0.1", free_port()) for _ in range(cluster.servers)]
    first = _FIRST_SERVER_PORT + run * cluster.servers
    return [(address(cluster.nodes + i), first + i) for i in range(cluster.servers)]


def store_point(run: int) -> tuple[str, int]:
    """Address and port of the store of one run's members."""
    return SWITCH, _FIRST_STORE_PORT + run


def store_arguments(point: tuple[str, int]) -> list[str]:
    """The command line of the store of members at this point."""
    where = ["--host", point[0], "--port", str(point[1])]
    return [sys.executable, "-u", "-m", "tacit.members.store", *where]


@dataclass(frozen=True)
class Serving:
    """The options of parameter servers.

    Attributes:
        timeout: seconds after which a silent worker that others wait for counts as lost; None: the ranks'
            time-out.
        checkpoint: the folder with a file of each; None: no checkpoints.
        every: seconds between two saves.
    """

    timeout: float | None = None
    checkpoint: Path | None = None
    every: float = 30.0

    @staticmethod
    def name(number: int) -> str:
        """The name of one server's checkpoint file."""
        return f"server{number}.pt"


def server_arguments(cluster: Cluster, number: int, point: tuple[str, int], serving: Serving) -> list[str]:
    """The command line of a parameter server that listens at this point."""
    options: dict[str, object] = {
        "--workers": cluster.world_size,
        "--host": point[0],
        "--port": point[1],
        "--number": number,
    }
    if serving.timeout is not None:
        options |= {"--timeout": serving.timeout}
    if serving.checkpoint is not None:
        options |= {"--checkpoint": serving.checkpoint / serving.name(number), "--every": serving.every}
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-u", "-m", "tacit.stores.server", *words]


def hub_arguments(point: tuple[str, int], members: int) -> list[str]:
    """The command line of a hub at this point, for so many members at most."""
    words = ["--min", "1", "--max", str(members), "--host", point[0], "--port", str(point[1])]
    return [sys.executable, "-u", "-m", "tacit.stores.server", *words]


def arguments(
    cluster: Cluster,
    node: int,
    meet: tuple[str, int],
    logs: str,
    argv: Sequence[str],
    restarts: int | None = None,
) -> list[str]:
    """The command line of the launcher of one node.

    `argv` is a script and its arguments, or ``-m``, a module and its arguments. `restarts`: how often the
    node's ranks are started again, each then a separate world; None: all nodes are one world.
    """
    alone = restarts is not None
    mine = address(node) if cluster.namespaces else meet[0]
    torchrun = {
        "--nnodes": 1 if alone else cluster.nodes,
        "--nproc-per-node": cluster.ranks_per_node,
        "--node-rank": 0 if alone else node,
        "--master-addr": mine if alone else meet[0],
        "--master-port": meet[1],
        "--local-addr": mine,
        "--rdzv-id": "tacit",
        "--max-restarts": restarts or 0,
        "--log-dir": logs,
    }
    options = [str(word) for pair in torchrun.items() for word in pair]
    rank = [sys.executable, "-I", "-S", str(_RANK), sys.executable, "-u", *argv]
    return [sys.executable, "-m", "torch.distributed.run", *options, "--no-python", *rank]


def environment(cluster: Cluster, node: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launcher of one node; its ranks inherit it."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _STALE_NAMES and not name.startswith(_STALE)
    }
    ours = {
        "GLOO_SOCKET_IFNAME": INTERFACE if cluster.namespaces else "lo",
        variables.NODE: str(node),
        variables.NODES: str(cluster.nodes),
        variables.CLUSTER: str(cluster),
        variables.NOTES: MARK,
    }
    if cluster.namespaces:
        ours[variables.INTERFACE] = INTERFACE
    ranks = {"OMP_NUM_THREADS": "1"} | inherited | dict(extra) | ours
    # The launcher of node 0 may leave first, and the others would log that at length after a good run.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL"}
    return ranks | quiet | {variables.RESTORE: json.dumps({name: ranks.get(name) for name in quiet})}
