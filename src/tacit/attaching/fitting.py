"""How a strategy fits what `attach` was given: the same checks for one that is named or chosen."""

from __future__ import annotations

from dataclasses import replace

from tacit.attaching import epochs
from tacit.attaching.grad_scaler import at_work
from tacit.attaching.validate import check_reduction, check_seed, check_weight, checked, refuse_on_shards
from tacit.fsdp.model import ShardedModel, far_level
from tacit.levels.spec import AttachSpec
from tacit.stores.client import placement


def fitted(spec: AttachSpec) -> AttachSpec:
    """The same, with the strategy as it works on this model. Nothing is changed, and no rank asks another.

    Raises:
        ConfigError: a number is wrong.
        AttachError: the model, the optimizer or another argument does not fit the strategy.
    """
    if isinstance(spec.model, ShardedModel):
        spec = replace(spec, strategy=far_level(spec.strategy, spec.group.size()), mesh=None)
        refuse_on_shards(spec.strategy, spec.scaler, spec.weight)
    checked(spec.model, spec.optimizers, spec.strategy)
    scaler = at_work(spec.scaler, spec.strategy)
    epochs.check_given(spec)
    check_weight(spec.strategy, spec.weight)
    check_reduction(spec.model, spec.strategy, spec.reduction)
    check_seed(spec.seed)
    where = placement.find_servers(spec.strategy, spec.servers)
    return replace(spec, strategy=placement.with_servers(spec.strategy, where), scaler=scaler)
