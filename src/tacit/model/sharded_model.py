"""A model that FSDP2 shards along the near axis of a mesh; tacit averages along the far axis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Reduction = Literal["mean", "sum"]
"""The reduction of gradients along the far axis."""

_CAP = 25 << 20
"""The most bytes of a rank's shards in one bucket; DDP's default for parameters."""


@dataclass(frozen=True)
class ShardedModel:
    """One replica, of which this rank has a shard of every parameter.

    Two objects are equal if their modules are.

    Attributes:
        module: the user's model.
        process_group: the ranks of the far axis, which have the same shard of other replicas; where replicas
            come and go, this rank alone.
        near: the ranks among which the replica is sharded; None where they are on several axes, and where
            replicas come and go.
        mesh: of the ranks that share this replica.
        ranks: all ranks that train the model, in order; if unknown, those of the far axis.
        shards: the number of shards.
        shard: the number of this rank's shard.
    """

    module: nn.Module
    process_group: dist.ProcessGroup = field(compare=False)
    near: dist.ProcessGroup | None = field(compare=False)
    mesh: DeviceMesh = field(compare=False)
    ranks: list[int] = field(compare=False)

    @property
    def shards(self) -> int:
        """The number of ranks that share the replica."""
        return self.mesh.size()

    @property
    def shard(self) -> int:
        """The number of this rank among them."""
        found: int = self.mesh.mesh.flatten().tolist().index(self.mesh.get_rank())
        return found

    @property
    def bucket_bytes_cap(self) -> int:
        """The most bytes of whole parameters in a bucket, so that uneven shards give equal buckets."""
        return _CAP * self.shards

    @property
    def find_unused_parameters(self) -> bool:
        """True: FSDP2 waits for no parameter's gradient."""
        return True

    @property
    def parameters_to_ignore(self) -> Collection[str]:
        """No parameters."""
        return ()

    def reshard(self) -> None:
        """Make the module hold its shards, also after a forward without backward, as in evaluation."""
        reshard(self.module)


def reshard(module: nn.Module) -> None:
    """See `ShardedModel.reshard`."""
    for each in module.modules():
        sharded: Any = each
        if hasattr(sharded, "reshard"):
            sharded.reshard()
