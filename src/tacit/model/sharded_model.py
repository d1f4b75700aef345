"""A model that FSDP2 shards on the near axis of a mesh, with what is averaged along the far axis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Reduction = Literal["mean", "sum"]
"""What becomes of gradients along the far axis."""

_CAP = 25 << 20
"""Bytes of a rank's shards that travel together at most; DDP's own for parameters."""


@dataclass(frozen=True)
class ShardedModel:
    """One replica, of which this rank has a shard of every parameter.

    Two are equal where the module is.

    Attributes:
        module: the user's model.
        process_group: the ranks of the far axis, which have the same shard of other replicas.
        near: the ranks among which the replica is sharded; None where they are on several axes.
        mesh: of the ranks that share this replica.
        ranks: all that train the model, in order; those of the far axis alone, where no more are known.
        shards: how many they are; this rank has number `shard`.
    """

    module: nn.Module
    process_group: dist.ProcessGroup = field(compare=False)
    near: dist.ProcessGroup | None = field(compare=False)
    mesh: DeviceMesh = field(compare=False)
    ranks: list[int] = field(compare=False)

    @property
    def shards(self) -> int:
        """How many ranks share the replica."""
        return self.mesh.size()

    @property
    def shard(self) -> int:
        """The number of this rank among them."""
        found: int = self.mesh.mesh.flatten().tolist().index(self.mesh.get_rank())
        return found

    @property
    def bucket_bytes_cap(self) -> int:
        """Of whole parameters, so that buckets are cut alike on all ranks, however uneven shards are."""
        return _CAP * self.shards

    @property
    def find_unused_parameters(self) -> bool:
        """True: FSDP2 waits for no parameter's gradient."""
        return True

    @property
    def parameters_to_ignore(self) -> Collection[str]:
        """None of them."""
        return ()

    def reshard(self) -> None:
        """Have the module hold its shards, also behind a forward without backward, as in evaluation."""
        reshard(self.module)


def reshard(module: nn.Module) -> None:
    """See `ShardedModel.reshard`."""
    for each in module.modules():
        sharded: Any = each
        if hasattr(sharded, "reshard"):
            sharded.reshard()
