"""Which models sharded by FSDP2 can be trained, and which level of a strategy runs on the far axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tacit.compressors import Dense
from tacit.contracts import (
    NODE,
    WORLD,
    NodeTopology,
)
from tacit.errors import AttachError
from tacit.model.sharded_model import ShardedModel, reshard
from tacit.strategy import AnyStrategy, Strategy
from tacit.transports.process_groups import alone, rank_in, ranks_of

_LINES = (
    'mesh = init_device_mesh(DEVICE_TYPE, (nodes, ranks), mesh_dim_names=("far", "near")), '
    'fully_shard(model, mesh=mesh["near"]) and attach(model, optimizer, strategy, mesh=mesh)'
)
_FOR_ADAM = "'lowbit' with Adam or AdamW, or for long trainings 'localsgd' or 'diloco'"
_PEERS = "attach one without servers, such as 'topk', 'int8', 'diloco' or 'localsgd'"


def sharded_of(
    module: nn.Module, mesh: DeviceMesh | None, group: dist.ProcessGroup | None, members: bool = False
) -> ShardedModel:
    """The model, with the ranks that have the same shards.

    Args:
        module: sharded by FSDP2, or with sharded modules in it.
        mesh: the mesh of all ranks; the model is sharded on all of its axes but one.
        group: the ranks of that axis, in place of a mesh.
        members: whether replicas come and go: that axis is then of those that are there, and no two ranks of
            a replica exchange anything in a step, as one may have to end its part of it without the other.

    Raises:
        AttachError: the model or the mesh does not fit; the message says what to write.
    """
    if members and not (mesh is None and group is None):
        raise AttachError(
            "mesh= and group= say which ranks have the same shards, and members= has them find each other: "
            "leave mesh= and group= out"
        )
    reshard(module)
    trained: dict[str, Any] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if not hasattr(p, "device_mesh"):
            raise AttachError(
                f"{name} is trained and not sharded, so the ranks of a replica would each change it "
                "otherwise: call fully_shard on the whole model too, after its layers"
            )
    if not trained:
        raise AttachError("the model has no parameter that is trained: there is nothing to average")
    first, own = next((name, p.device_mesh) for name, p in trained.items())
    for name, p in trained.items():
        _check_placed(name, p)
        if p.device_mesh != own:
            raise AttachError(
                f"{name} is sharded on another mesh than {first}: give fully_shard the same mesh everywhere"
            )
    far = alone() if members else group if group is not None else _far_group(mesh, own)
    _check_far(far, _ranks(own))
    near = own.get_group() if own.ndim == 1 and not members else None
    return ShardedModel(module, far, near, own, _everyone(mesh if group is None else None, far, own))


def _check_placed(name: str, p: Any) -> None:
    if p.device_mesh.ndim > 1 and p.placements[0].is_replicate():
        raise AttachError(
            f"{name} is sharded and replicated, on a mesh of {p.device_mesh.ndim} axes (HSDP): FSDP2 itself "
            "then averages gradients along the far axis in every step, and nothing is left to save. Write "
            f"{_LINES}"
        )
    if p.device.type != p.device_mesh.device_type:
        raise AttachError(
            f"{name} is on {p.device}, and its mesh is for {p.device_mesh.device_type} (CPU offload), which "
            "is not supported: leave offload_policy out. attach(..., exchange_on='host') keeps tacit's state "
            "in the host's memory"
        )


def _far_group(mesh: DeviceMesh | None, own: DeviceMesh) -> dist.ProcessGroup:
    """The group of the one axis of `mesh` on which the model is not sharded."""
    ranks = sorted(_ranks(own))
    if mesh is None:
        raise AttachError(
            f"the model is sharded among ranks {ranks}, and nothing says which other ranks have the same "
            f"shards: write {_LINES}; or give their process group, attach(..., group=)"
        )
    if not isinstance(mesh, DeviceMesh):
        raise AttachError(f"mesh={mesh!r} is no DeviceMesh: write {_LINES}")
    here = mesh.get_coordinate()
    if here is None:
        raise AttachError(f"rank {rank_in()} is not in the mesh {mesh.mesh.tolist()}: write {_LINES}")
    if mesh.ndim <= own.ndim and sorted(_ranks(mesh)) == ranks:
        raise AttachError(
            f"the model is sharded on all axes of the mesh {tuple(mesh.mesh.shape)}, and no axis is left on "
            f"which to average: write {_LINES}"
        )
    planes = {axis: mesh.mesh.select(axis, at).flatten().tolist() for axis, at in enumerate(here)}
    found = [axis for axis, plane in planes.items() if sorted(plane) == ranks]
    names, used = mesh.mesh_dim_names or (), own.mesh_dim_names or ()
    found.sort(key=lambda axis: axis < len(names) and names[axis] in used)
    if not found:
        raise AttachError(
            f"the model is sharded among ranks {ranks}, which are not all axes but one of the mesh "
            f"{mesh.mesh.tolist()}: write {_LINES}"
        )
    return mesh.get_group(found[0])


def _check_far(far: dist.ProcessGroup, own: list[int]) -> None:
    ranks, me = ranks_of(far), rank_in()
    if set(ranks) & set(own) != {me}:
        raise AttachError(
            f"the group of ranks {ranks} is not this rank, {me}, and others with the same shards: the model "
            f"is sharded among ranks {sorted(own)}, which have other shards. Write {_LINES}"
        )


def _everyone(mesh: DeviceMesh | None, far: dist.ProcessGroup, own: DeviceMesh) -> list[int]:
    if mesh is not None:
        return sorted(_ranks(mesh))
    world = ranks_of()
    return world if far.size() * own.size() == len(world) else ranks_of(far)


def _ranks(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


# ---- strategies ---------------------------------------------------------------------------------------


def far_level(strategy: AnyStrategy, replicas: int) -> Strategy:
    """The level for the far axis, as FSDP2 itself averages gradients on the near one.

    `replicas`: the number of replicas on the far axis; one alone needs no level.

    Raises:
        AttachError: the strategy cannot work on sharded models; the message says what to write.
    """
    far = strategy.levels[-1]
    if far.topology.in_pairs:
        raise AttachError(
            f"{strategy.name!r} averages whole parameters of two ranks, and a rank of a sharded model has "
            f"shards: {_PEERS}"
        )
    if far.server is not None:
        raise AttachError(
            f"{strategy.name!r} uses parameter servers, and these take whole parameters and no shards: "
            f"{_PEERS}"
        )
    if len(strategy.levels) > 1:
        _check_near(strategy, replicas)
    if far.subject == "nothing":
        far = replace(far, subject="gradient")  # FSDP2 leaves the far axis to tacit
    if far.subject == "gradient":
        _check_gradients(far)
    if isinstance(far.topology, NodeTopology) and len(strategy.levels) > 1:
        far = replace(far, topology=far.topology.without_nodes)
    if {far.topology.scope, far.topology.meets} != {WORLD}:
        raise AttachError(
            f"{strategy.name!r} averages by node, and a sharded model's ranks of a node are one replica: "
            "leave its topology out; or write topology=all-gather in a text (all-reduce where payloads add "
            "up), and topology=Flat() in Python"
        )
    return replace(far, name=strategy.name)


def _check_gradients(far: Strategy) -> None:
    """Refuse strategies that need more of a gradient than this rank's shard."""
    if far.overlap.layerwise:
        raise AttachError(
            f"{far.name!r} uses the gradients of DDP's parameters, and FSDP2 gathers each module's "
            "parameters ahead itself: write overlap=Bucketwise(), or attach 'dense' or 'int8'"
        )
    if far.overlap.steps:
        raise AttachError(
            f"{far.name!r} applies a gradient one step late, which is not supported on sharded models "
            "(FSDP2): write overlap=Bucketwise(), or attach 'topk', 'int8' or 'diloco'"
        )
    if far.compressor.takes_momentum is not None:
        raise AttachError(
            f"{far.name!r} takes over the optimizer's momentum, which is not supported on sharded models "
            f"(FSDP2): attach {_FOR_ADAM}; with SGD 'topk:warmup_steps=N', which also sends the largest "
            "entries, lowers their number over N steps too, and leaves the optimizer as it is"
        )


def _check_near(strategy: AnyStrategy, replicas: int) -> None:
    """Check that the near level is what FSDP2 does: a dense mean of gradients in every step."""
    near, *others = strategy.levels
    if others and others[-1].renewals is not None:
        raise AttachError(
            f"{strategy.name!r} averages gradients along both axes in some steps, which is not supported on "
            f"sharded models (FSDP2): attach {_FOR_ADAM}"
        )
    skips = near.rounds.skips
    scopes = {near.topology.scope, near.topology.meets}
    dense = near.compressor == Dense() and (scopes == {NODE} or (scopes == {WORLD} and replicas == 1))
    if scopes == {WORLD} and not near.rounds.every_step:
        raise AttachError(
            f"{strategy.name!r} averages the gradients of all ranks in some steps, which is not supported on "
            "sharded models (FSDP2): attach 'localsgd', which averages parameters from the first step on, or "
            "'lowbit'; or attach 'dense' for the first steps, close that session, and attach 'localsgd'"
        )
    if scopes == {WORLD} and replicas > 1:
        raise AttachError(
            f"{strategy.name!r} averages the gradients of all ranks, and FSDP2 averages those of one replica "
            f"alone, of {replicas}: shard the model among all ranks, on a mesh whose far axis has one rank, "
            "or attach 'diloco'"
        )
    if len(others) != 1 or not dense or skips:
        raise AttachError(
            f"{strategy.name!r} is not possible on a sharded model, where FSDP2 itself averages gradients on "
            "the near axis, densely and in every step: leave compressors and periods of the near level out, "
            "as 'ednncomm' and 'daso:local=1' do, or attach the far level alone"
        )
