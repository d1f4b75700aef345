"""Which ranks share a node: known from the launcher, or from a DeviceMesh."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tacit.contracts import NODE, NodeTopology
from tacit.errors import AttachError
from tacit.links import Links, places_of
from tacit.strategy import AnyStrategy, Strategy
from tacit.transports.probing import latencies, measure
from tacit.transports.process_groups import gathered, ranks_of

_log = logging.getLogger("tacit")

_SHORTLY = 0.05
"""Seconds of a transfer."""
_PLACED = range(4, 65)
"""Among so many nodes places are looked for: of more, the latency of each pair takes seconds."""
VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")
"""The variables by which torchrun, Slurm and Ray Train say which node a process is on."""


def read_nodes(group: dist.ProcessGroup, mesh: DeviceMesh | None) -> list[list[int]]:
    """The ranks of each node, counted within the group. A collective call.

    Raises:
        AttachError: nothing says which ranks share a node, or nodes differ in size.
    """
    laid_out = _by_mesh(group, mesh) if mesh is not None else []
    numbers = _everybodys(group, zlib.crc32(repr(laid_out).encode()) if laid_out else 0)
    nodes = laid_out or _by_launcher(numbers, ranks_of(group))
    most = max(nodes, key=len)
    for i, node in enumerate(nodes):
        if len(node) != len(most):
            first = ranks_of(group)[node[0]]
            raise AttachError(
                f"node {i} has {len(node)} ranks (first: rank {first}) and another has {len(most)}: a "
                "strategy by nodes needs as many ranks on every node; start as many on each, or choose an "
                "algorithm without levels"
            )
    return nodes


def measured_links(group: dist.ProcessGroup, mesh: DeviceMesh | None) -> Links:
    """Measure the links between nodes, shortly. A collective call.

    If nothing says which ranks share a node, each rank counts as a node.

    Raises:
        ProbeError: a link carried nothing.
    """
    try:
        nodes = read_nodes(group, mesh)
    except AttachError:
        nodes = [[rank] for rank in range(group.size())]
    return measure(group, nodes, seconds=_SHORTLY)


def by_places(
    strategy: AnyStrategy, nodes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> tuple[AnyStrategy, Sequence[Sequence[int]]]:
    """The strategy and the nodes; where latencies show places, these count as nodes. A collective call.

    For a strategy of one level that goes by nodes, among 4 to 64 of them.

    Raises:
        ProbeError: nothing comes through a link.
    """
    topology = strategy.levels[0].topology
    if not isinstance(strategy, Strategy) or not isinstance(topology, NodeTopology):
        return strategy, nodes
    if topology.near or topology.needs_rates or len(nodes) not in _PLACED:
        return strategy, nodes
    places = places_of(latencies(group, nodes))
    if len(places) == 1:
        return strategy, nodes
    unequal = len({*map(len, places)}) > 1
    if group.rank() == 0:
        told = f"by their latencies, nodes are at {len(places)} places: {places}"
        if unequal:
            _log.warning("%s; %r goes by nodes alone, as places differ in size", told, strategy.name)
        else:
            _log.info("%s; %r averages inside them first", told, strategy.name)
    if unequal:
        return strategy, nodes
    levels = tuple(each for each in (len(nodes[0]), len(places[0])) if each > 1)
    joined = [[rank for i in place for rank in nodes[i]] for place in places]
    return replace(strategy, topology=topology.of_places(levels)), joined


def warn_of_one(strategy: AnyStrategy, nodes: Sequence[Sequence[int]]) -> None:
    """Log a warning if all ranks are on one node, where a strategy by nodes equals plain DDP."""
    near = strategy.levels[0]
    by_node = near.topology.scope == NODE or isinstance(near.topology, NodeTopology)
    if len(nodes) != 1 or len(nodes[0]) == 1 or near.subject != "gradient" or not by_node:
        return
    ranks = len(nodes[0])
    inner = ranks // 2 if ranks % 2 == 0 else 1
    _log.warning(
        "all %d ranks are on one node, where %r is plain DDP: it averages gradients inside the node, and "
        "there is no other node to save messages to. Start it on several nodes. To try it on one machine: "
        'tacit run --cluster %dx%d, or attach(..., mesh=init_device_mesh("cpu", (%d, %d), '
        'mesh_dim_names=("net", "node")))',
        *(ranks, strategy.name, ranks // inner, inner, ranks // inner, inner),
    )


def _by_mesh(group: dist.ProcessGroup, mesh: DeviceMesh) -> list[list[int]]:
    ranks = ranks_of(group)
    if mesh.ndim != 2 or sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        raise AttachError(
            f"the mesh {tuple(mesh.mesh.shape)} over ranks {mesh.mesh.flatten().tolist()} does not lay out "
            f"the model's ranks {ranks} as nodes x ranks of a node: write "
            'init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("net", "node"))'
        )
    return [[ranks.index(rank) for rank in row] for row in mesh.mesh.tolist()]


def _everybodys(group: dist.ProcessGroup, layout: int) -> list[int]:
    """The node of each rank, -1 if it does not know; all ranks must have the same mesh."""
    said = next((os.environ[name] for name in VARIABLES if name in os.environ), "-1")
    mine = torch.tensor([int(said), layout])
    all_ = gathered(mine, group)
    ranks = ranks_of(group)
    different = [rank for rank, theirs in zip(ranks, all_, strict=True) if theirs[1] != all_[0][1]]
    if different:
        raise AttachError(
            f"ranks {different} give attach another mesh than rank {ranks[0]}: give every rank the same one"
        )
    return [int(theirs[0]) for theirs in all_]


def _by_launcher(numbers: list[int], ranks: list[int]) -> list[list[int]]:
    if -1 in numbers:
        silent = ranks[numbers.index(-1)]
        raise AttachError(
            f"rank {silent} does not know its node, as neither {' nor '.join(VARIABLES)} is set: "
            "start with torchrun, srun or Ray Train, or give attach(..., mesh="
            'init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("net", "node")))'
        )
    return _grouped(numbers)


def _grouped(numbers: Sequence[int]) -> list[list[int]]:
    return [
        [rank for rank, other in enumerate(numbers) if other == number] for number in dict.fromkeys(numbers)
    ]
