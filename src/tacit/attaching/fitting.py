"""What `attach` was given, and how a strategy fits it: the same checks for one that is named or chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tacit.attaching import epochs as epochs_given
from tacit.attaching.grad_scaler import at_work
from tacit.attaching.validate import check_reduction, check_seed, check_weight, checked, refuse_on_shards
from tacit.fsdp.gradients import Reduction
from tacit.fsdp.model import ShardedModel, far_level
from tacit.levels.spec import AttachOptions
from tacit.model.trained_model import TrainedModel
from tacit.session.buckets import Policy
from tacit.stores.client import placement
from tacit.strategy import AnyStrategy


@dataclass(frozen=True, eq=False, kw_only=True)
class AttachArguments:
    """What the user gave `attach` beside the strategy; see there. Not yet checked."""

    model: TrainedModel
    optimizers: Sequence[Optimizer]
    scaler: object = None
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


def fitted(given: AttachArguments, strategy: AnyStrategy) -> AttachOptions:
    """What a session of this strategy is made of. Nothing is changed, and no rank asks another.

    Raises:
        ConfigError: a number is wrong.
        AttachError: the model, the optimizer or another argument does not fit the strategy.
    """
    mesh = given.mesh
    if isinstance(given.model, ShardedModel):
        strategy, mesh = far_level(strategy, given.model.process_group.size()), None
        refuse_on_shards(strategy, given.scaler, given.weight)
    named = checked(given.model, given.optimizers, strategy)
    scaler = at_work(given.scaler, strategy)
    schedule_state = epochs_given.given(strategy, given.steps_per_epoch, given.epochs)
    check_weight(strategy, given.weight)
    check_reduction(given.model, strategy, given.reduction)
    check_seed(given.seed)
    where = placement.find_servers(strategy, given.servers)
    return AttachOptions(
        model=given.model,
        optimizers=given.optimizers,
        strategy=placement.with_servers(strategy, where),
        named=named,
        scaler=scaler,
        policy=given.policy,
        timeout=given.timeout,
        schedule_state=schedule_state,
        mesh=mesh,
        weight=given.weight,
        servers=where,
        seed=given.seed,
        exchange_on=given.exchange_on,
        reduction=given.reduction,
        probe=given.probe,
    )
