"""The arguments of `attach` and the strategy, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit.contracts import NODE, ScheduleState
from tacit.model.frozen_check import trainable
from tacit.model.sharded_model import Reduction, ShardedModel
from tacit.model.trained_model import TrainedModel, locals_of
from tacit.session.buckets import Policy
from tacit.strategy import AnyStrategy
from tacit.torch_compat import in_join, timeout_of
from tacit.transports.process_groups import ranks_of

_BUCKETS_A_HUB = 8
_LEAST_MESSAGE = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class AttachSpec:
    """The arguments of `attach` or `CommState`, and the strategy; see `attach` for each.

    `fitted` checks it, and adapts the strategy to the model; `dataclasses.replace` makes one with another
    strategy.

    Attributes:
        scaler: once fitted, None also if the user's scaler is disabled.
        chosen_by: what chose the strategy; "": the user.
        members: the group of the present members, where replicas come and go; None: all ranks stay.
        hubs: how many share out what members exchange.
        weights: theirs, 0 where none was given.
    """

    model: TrainedModel
    optimizers: Sequence[Optimizer]
    strategy: AnyStrategy
    scaler: GradScaler | None = None
    policy: Policy | None = None
    timeout: timedelta | None = None
    steps_per_epoch: int | None = None
    epochs: int | None = None
    mesh: DeviceMesh | None = None
    weight: float | None = None
    servers: Sequence[str] | None = None
    seed: int = 0
    exchange_on: str | None = None
    reduction: Reduction = "mean"
    probe: bool = False
    chosen_by: str = ""
    members: dist.ProcessGroup | None = None
    hubs: int = 1
    weights: Sequence[float] = ()

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The trainable parameters by name, in the model's order."""
        return trainable(self.model)

    @cached_property
    def bucket_bytes_cap(self) -> int:
        """The most bytes of a bucket, up to DDP's: each of several hubs carries some of the buckets."""
        cap = int(self.model.bucket_bytes_cap)
        if self.hubs == 1:
            return cap
        size = sum(p.numel() * p.element_size() for p in locals_of(self.named).values())
        least = min(_LEAST_MESSAGE, -(-size // self.hubs))
        return min(cap, max(least, size // (_BUCKETS_A_HUB * self.hubs)))

    @property
    def schedule_state(self) -> ScheduleState:
        """The values of `steps_per_epoch` and `epochs`, if the user gave them."""
        given = {"steps_per_epoch": self.steps_per_epoch, "epochs": self.epochs}
        return {name: float(value) for name, value in given.items() if value is not None}

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model, if it is a DistributedDataParallel."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def sharded(self) -> ShardedModel | None:
        """The model, if FSDP2 shards it."""
        return self.model if isinstance(self.model, ShardedModel) else None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks are the replicas, or have the same shard of each."""
        return self.members or self.model.process_group

    @property
    def ranks(self) -> list[int]:
        """All ranks that train the model, including those with other shards."""
        return ranks_of(self.group) if self.sharded is None else self.sharded.ranks

    @property
    def time_limit(self) -> timedelta:
        """The time after which a silent peer is an error: the user's, or the process group's."""
        return self.timeout or timeout_of(self.group)

    @cached_property
    def leaves_ddp_alone(self) -> bool:
        """Whether DDP exchanges the gradients itself."""
        return self.strategy.levels[0].subject == "nothing"

    @property
    def periodic(self) -> bool:
        """Whether replicas step alone between rounds."""
        return is_periodic(self.strategy)

    @property
    def period(self) -> int:
        """The number of steps after which the rounds repeat."""
        return max(level.rounds.sync_every or 1 for level in self.strategy.levels)

    @property
    def replicated_in_node(self) -> bool:
        """Whether the nearest level gives a node's ranks equal gradients in every step."""
        near = self.strategy.levels[0]
        unweighted = self.weight is None and self.scaler is None
        return unweighted and near.topology.scope == NODE and near.rounds.every_step

    @property
    def in_join(self) -> bool:
        """Whether torch's `Join` context is at work on the model: ranks may take unequally many steps."""
        return self.ddp is not None and in_join(self.ddp)

    @property
    def scaled(self) -> bool:
        """Whether steps are counted by the scaler's attempts."""
        return self.scaler is not None and not self.leaves_ddp_alone


def is_periodic(strategy: AnyStrategy) -> bool:
    """Whether replicas step alone between rounds."""
    return any(level.subject == "delta" for level in strategy.levels)
