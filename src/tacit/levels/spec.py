"""What a session is attached with: what the user gave, once it has been checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit.contracts import ScheduleState
from tacit.fsdp.gradients import Reduction
from tacit.fsdp.model import ShardedModel
from tacit.model.trained_model import TrainedModel
from tacit.session.buckets import Policy
from tacit.stores.client.placement import Addresses
from tacit.strategy import AnyStrategy
from tacit.torch_compat import timeout_of
from tacit.transports.process_groups import ranks_of


@dataclass(frozen=True, eq=False, kw_only=True)
class AttachOptions:
    """What `attach` and `CommState` hand on; see `attach` for what each is.

    Attributes:
        named: the trainable parameters by name, in the model's order.
        scaler: None too where the given one does not scale.
        schedule_state: "steps_per_epoch" and "epochs", where they were given.
        servers: host and port of each parameter server.
        probe: whether the links are measured.
        chosen_by: where the strategy was chosen, by what; "" where the user named it.
    """

    model: TrainedModel
    optimizers: Sequence[Optimizer]
    strategy: AnyStrategy
    named: dict[str, Tensor]
    scaler: GradScaler | None = None
    policy: Policy | None = None
    timeout: timedelta | None = None
    schedule_state: ScheduleState = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    weight: float | None = None
    servers: Addresses = ()
    seed: int = 0
    exchange_on: str | None = None
    reduction: Reduction = "mean"
    probe: bool = False
    chosen_by: str = ""

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model, where it is DDP's."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def sharded(self) -> ShardedModel | None:
        """The model, where it is FSDP2's."""
        return self.model if isinstance(self.model, ShardedModel) else None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks are the replicas, or have the same shard of each."""
        return self.model.process_group

    @property
    def ranks(self) -> list[int]:
        """All ranks that train the model: those that have other shards than this one, too."""
        return ranks_of(self.group) if self.sharded is None else self.sharded.ranks

    @property
    def time_limit(self) -> timedelta:
        """After which a peer that does not answer is an error: the given one, or the group's own."""
        return self.timeout or timeout_of(self.group)

    @property
    def leaves_ddp_alone(self) -> bool:
        """Whether DDP exchanges the gradients itself."""
        return self.strategy.levels[0].subject == "nothing"

    @property
    def periodic(self) -> bool:
        """Whether replicas take steps of their own between rounds."""
        return is_periodic(self.strategy)

    @property
    def period(self) -> int:
        """After how many steps the rounds repeat."""
        return max(int(getattr(level.rounds, "sync_every", 1) or 1) for level in self.strategy.levels)

    @property
    def scaled(self) -> bool:
        """Whether steps are counted by the scaler's attempts."""
        return self.scaler is not None and not self.leaves_ddp_alone


def is_periodic(strategy: AnyStrategy) -> bool:
    """Whether replicas take steps of their own between rounds."""
    return any(level.subject == "delta" for level in strategy.levels)
