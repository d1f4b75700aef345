"""The state of a session on a sharded model in a checkpoint: as DTensors that other layouts can load.

State with one entry for each entry of a parameter is a DTensor with the parameter's layout, so that
torch.distributed.checkpoint joins its shards, and cuts them for another layout. Other state is saved under
the number of the shard, and can only be loaded with the same layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from tacit.checkpoint.resize import KEY
from tacit.errors import CheckpointError
from tacit.model.sharded_model import ShardedModel
from tacit.model.trained_model import local

SHARDS = "shards"
"""The key of the number of ranks that share a replica."""
_LOSSES = "losses"
_OWN = re.compile(r"shard(?P<shard>\d+):(?P<key>.*)", re.DOTALL)

Field = tuple[int, str, str]
"""(level, parameter, field)."""


def whole(
    model: ShardedModel, named: Mapping[str, Any], state: Mapping[str, Any], others: Collection[Field]
) -> dict[str, Any]:
    """The state that every rank saves.

    Args:
        model: the sharded model.
        named: its parameters.
        state: the state of this rank's shards, as `checkpoint.save` makes it.
        others: the fields that do not have one entry for each entry of the parameter.
    """
    found: dict[str, Any] = {SHARDS: model.shards}
    for key, value in state.items():
        match = KEY.fullmatch(key) if isinstance(value, Tensor) else None
        if match is None:
            found[key] = value
        elif match["field"] == _LOSSES and not bool(value.any()):
            continue  # another layout has no such rank
        elif _by_entry(match, named, others):
            p = named[match["name"]].detach()
            shard = value.view(local(p).shape)
            if not shard.numel():
                continue  # others have all of it
            found[key] = type(p).from_local(
                shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        else:
            found[f"shard{model.shard}:{key}"] = value
    return found


def mine(
    model: ShardedModel, named: Mapping[str, Any], state: Mapping[str, Any], others: Collection[Field]
) -> dict[str, Any]:
    """This rank's shards of a saved state, of the same or another layout; the arguments are those of `whole`.

    Raises:
        CheckpointError: the state is of a model that was not sharded.
    """
    if SHARDS not in state:
        raise CheckpointError(
            "the checkpoint is of a model that was not sharded: attach to a DistributedDataParallel, or "
            "start without the session's state"
        )
    found: dict[str, Any] = {}
    for key, value in state.items():
        own = _OWN.fullmatch(key)
        if own is not None:
            if int(own["shard"]) == model.shard:
                found[own["key"]] = value
            continue
        match = KEY.fullmatch(key) if isinstance(value, Tensor) else None
        if match is not None and _by_entry(match, named, others):
            value = local(value) if hasattr(value, "to_local") else _cut(value, named[match["name"]])
            value = value.reshape(-1)
        if key != SHARDS:
            found[key] = value
    return found


def refuse_shards(states: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` for states that only torch.distributed.checkpoint can join."""
    if SHARDS in states:
        raise CheckpointError(
            "these are states of a sharded model, whose shards join_states does not put together: save with "
            "torch.distributed.checkpoint, and load with it, or what its dcp_to_torch_save has made"
        )


def _by_entry(match: re.Match[str], named: Mapping[str, Any], others: Collection[Field]) -> bool:
    return match["name"] in named and (int(match["level"]), match["name"], match["field"]) not in others


def _cut(value: Tensor, p: Any) -> Tensor:
    """This rank's shard of a whole tensor."""
    if value.shape != p.shape:
        return value  # refused when it is read
    for axis, placement in enumerate(p.placements):
        if placement.is_shard():
            chunks = value.chunk(p.device_mesh.size(axis), placement.dim)
            at = p.device_mesh.get_coordinate()[axis]
            value = chunks[at] if at < len(chunks) else value.narrow(placement.dim, 0, 0)
    return value if value.shape == local(p).shape else torch.empty(0, dtype=torch.float32)
