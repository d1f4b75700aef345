"""Whether a strategy fits the arguments of `attach`: the same checks for named and for chosen strategies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Adam, Optimizer

from tacit import checks
from tacit.attaching import epoch_length
from tacit.contracts import WORLD
from tacit.environment import SERVERS
from tacit.errors import AttachError
from tacit.gradients.ddp_hook import joined
from tacit.levels.device_placement import check_backend, device_of
from tacit.levels.spec import AttachSpec
from tacit.model.frozen_check import refuse_sparse
from tacit.rounds import During
from tacit.strategy import AnyStrategy, Strategy
from tacit.torch_compat import reduces_in_python

_log = logging.getLogger("tacit")

MOST_SEED = 2**63 - 1
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def fitted(spec: AttachSpec) -> AttachSpec:
    """The spec with the strategy adapted to this model. Nothing is changed, and it is no collective call.

    Raises:
        ConfigError: a number is wrong.
        AttachError: the model, the optimizer or another argument does not fit the strategy.
    """
    if spec.sharded is not None:
        from tacit.fsdp.model import far_level

        spec = replace(spec, strategy=far_level(spec.strategy, spec.group.size()), mesh=None)
    for rule in RULES:
        for why in rule(spec) or ():
            raise AttachError(why)
    scales = spec.scaler is not None and spec.scaler.is_enabled()
    return replace(spec, strategy=_with_servers(spec), scaler=spec.scaler if scales else None)


# ---- the rules: each yields what is wrong, with what to write, or raises it ----------------------------


def shards(spec: AttachSpec) -> Iterator[str]:
    """A sharded model has no scaler, no weight, and no rounds that depend on the replicas' variance."""
    if spec.sharded is None:
        return
    if isinstance(spec.scaler, GradScaler) and spec.scaler.is_enabled():
        yield (
            "scaler= is not supported on sharded models (FSDP2), where each rank sees its shards of a "
            "gradient alone: train in bfloat16, which needs no scaler, by "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(torch.bfloat16))"
        )
    if spec.weight is not None:
        yield (
            f"weight={spec.weight!r} is not supported on sharded models (FSDP2), whose ranks share replicas: "
            "leave it out, and give all replicas as many samples"
        )
    for level in spec.strategy.levels:
        if "drift" in level.rounds.observed_metrics:
            yield (
                f"rounds={level.rounds} depend on the replicas' variance, of which a sharded model's ranks "
                f"see "
                "shards alone: write rounds=Every(16)"
            )


def equal_again(spec: AttachSpec) -> Iterator[str]:
    """Replicas become equal again, and there is an optimizer whose steps are followed."""
    strategy = spec.strategy
    subjects = {level.subject for level in strategy.levels}
    last = strategy.levels[-1]
    if last.topology.scope != WORLD and subjects != {"nothing"}:
        yield (
            f"topology={last.topology} does not reach all replicas, so they would never be equal again: "
            "write Flat() or Hierarchical(), or join it by Levels with one that does"
        )
    if last.subject == "gradient" and not last.rounds.every_step:
        yield (
            f"rounds={last.rounds} end while training goes on, so replicas would never be equal again: "
            "join it by Levels with one that exchanges their deltas"
        )
    yield from renewals(spec)
    if not spec.optimizers and ("delta" in subjects or last.independent):
        yield (f"{strategy.name!r} exchanges after optimizer.step: give attach the optimizer")


def renewals(spec: AttachSpec) -> Iterator[str]:
    """A variance moves only in steps in which gradients are averaged."""
    strategy = spec.strategy
    for i, far in enumerate(strategy.levels):
        nearer = [level.rounds for level in strategy.levels[:i]]
        if far.renewals is not None and During(far.renewals) not in nearer:
            yield (
                f"variance={far.variance} of {strategy.name!r} moves where a nearer level averages "
                "gradients, and there is none that does so in these steps: join it by Levels with "
                f"Strategy(rounds=During({far.variance})), as zeroone-adam does"
            )


def model(spec: AttachSpec) -> Iterator[str]:
    """The model's parameters can be exchanged; without a hook of tacit any model fits."""
    subjects = {level.subject for level in spec.strategy.levels}
    if subjects == {"nothing"}:
        return
    model, named, gradients = spec.model, spec.named, "gradient" in subjects
    if spec.in_join:
        raise joined()
    device = device_of(named)
    check_backend(spec.group, device)
    if device.type == "cuda":
        from tacit.levels.gpu_checks import unfit

        yield from unfit(device, None if spec.ddp is None else spec.ddp.device_ids, spec.group)
    if gradients and reduces_in_python(model):
        yield (
            "DDP uses torch's Python reducer, which gives a communication hook single gradients and no "
            'buckets: write torch._dynamo.config.optimize_ddp = "ddp_optimizer" before you wrap the model'
        )
    for name, p in named.items():
        if p.dtype not in _TYPES:
            yield (
                f"{name} is {p.dtype}: only parameters of float32, float64, float16 and bfloat16 are "
                f"supported. {_instead(p)}, or use 'ddp', which leaves DDP as it is"
            )
    if gradients:
        refuse_sparse(model, spec.strategy.name)


def _instead(p: Tensor) -> str:
    if p.is_complex():
        return "Keep it as a real parameter, torch.view_as_real(p), and view it as complex in forward"
    return "Keep it as float32, and convert it in forward"


def layerwise(spec: AttachSpec) -> None:
    """Steps can be taken layer by layer."""
    strategy = spec.strategy
    if strategy.levels[0].overlap.into_forward:
        from tacit.gradients.layerwise.forward_steps import refuse_forward_steps

        refuse_forward_steps(spec.model.module, spec.optimizers, strategy.name)


def unused(spec: AttachSpec) -> Iterator[str]:
    """With `find_unused_parameters` DDP must not discard what no later round sends again."""
    strategy, near = spec.strategy, spec.strategy.levels[0]
    if not spec.model.find_unused_parameters:
        return
    if near.overlap.steps > 0 and near.subject == "gradient":
        why = (
            f"{strategy.name!r} gives a step the mean of the step before, and with "
            "find_unused_parameters=True DDP throws it away for a parameter that no rank uses in this one"
        )
    elif near.overlap.layerwise:
        why = (
            f"{strategy.name!r} gives each parameter its mean when it is there, and with "
            "find_unused_parameters=True DDP alone knows for which no rank has a gradient"
        )
    elif near.server is not None and near.server.has_feedback:
        why = (
            f"the server of {strategy.name!r} sends with an answer what the answers before did not say, and "
            "with find_unused_parameters=True DDP throws it away for a parameter that no rank uses in a step"
        )
    else:
        return
    yield (
        f"{why}: make the model with find_unused_parameters=False, or attach another algorithm, such as "
        "'dense'"
    )


def pairs(spec: AttachSpec) -> Iterator[str]:
    """If ranks do not wait for each other, nothing else may make them wait in each step."""
    strategy, model = spec.strategy, spec.model
    if not strategy.levels[-1].topology.in_pairs:
        return
    if model.find_unused_parameters:
        yield (
            f"with {strategy.name!r} nobody waits for anybody, and with find_unused_parameters=True all "
            "ranks compare in each backward which parameters they used: make the model with "
            "find_unused_parameters=False, or attach 'gossip'"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            yield (
                f"with {strategy.name!r} nobody waits for anybody, and {name} is a SyncBatchNorm, for which "
                "all ranks wait in each forward: use BatchNorm, whose statistics are averaged with the "
                "parameters, or GroupNorm, or attach 'gossip'"
            )


def ranks(spec: AttachSpec) -> None:
    """The topology works with this number of ranks."""
    spec.strategy.levels[-1].topology.check_ranks(spec.group.size())


def optimizers(spec: AttachSpec) -> Iterator[str]:
    """Each holds parameters of the model, and fits the strategy."""
    strategy = spec.strategy
    for optimizer in spec.optimizers:
        kind = type(optimizer).__name__
        # By this torch's ZeroRedundancyOptimizer and fairscale's OSS gather the state that each rank keeps.
        if spec.periodic and hasattr(optimizer, "consolidate_state_dict"):
            yield (
                f"{kind} steps each parameter on one rank only, by that rank's gradient, and "
                f"{strategy.name!r} averages replicas that each step by other gradients: give attach an "
                "optimizer that steps all parameters, such as torch.optim.AdamW; or attach 'dense' or "
                "'int8', which average gradients"
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held for p in spec.named.values()):
            yield (
                "the optimizer holds no parameter of this model: give attach the optimizer that was made "
                "with model.parameters(), after fully_shard where that is called"
            )
    yield from steps_with(strategy, spec.optimizers, spec.named)


def steps_with(
    strategy: AnyStrategy, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
) -> Iterator[str]:
    """The strategy goes with the steps of these optimizers; if Adam's variance moves seldom, all have one."""
    exact = all(level.compressor.linear or level.subject == "nothing" for level in strategy.levels)
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) and not exact:
            yield (
                f"LBFGS uses differences of gradients, and what {strategy.name!r} sends is not exact, by "
                "which it may diverge: attach 'dense' or 'bf16', or use another optimizer, such as "
                "torch.optim.AdamW"
            )
        if any(group.get("lr") is None for group in optimizer.param_groups):
            for level in strategy.levels:
                yield from _needs_no_rate(strategy, level, type(optimizer).__name__)
    for level in strategy.levels:
        if level.renewals is not None:
            from tacit.optimizer_hooks.kept_variance import refuse_optimizers

            refuse_optimizers(level.renewals, optimizers, named)


def warn_of_late_gradients(strategy: AnyStrategy, optimizers: Sequence[Optimizer]) -> None:
    """Log a warning where Adam gets gradients much of which is sent late, which cost accuracy."""
    adam = next((type(each).__name__ for each in optimizers if isinstance(each, Adam)), None)
    if adam is not None:
        from tacit.algorithms.auto import SENT_LATE

        if strategy.name.partition(":")[0] in SENT_LATE:
            _log.warning(
                "%s sends much of a gradient many steps late, which cost accuracy with %s: take 'lowbit', or "
                "on DDP 'onebit-adam' or 'zeroone-adam'; or SGD",
                *(strategy.name, adam),
            )


def _needs_no_rate(strategy: AnyStrategy, level: Strategy, optimizer: str) -> Iterator[str]:
    """Nothing in the strategy depends on the learning rate, if the optimizer has none."""
    rounds = level.rounds
    by_rate = rounds.observed_metrics and not rounds.phased and rounds.observed_metrics != {"transfer"}
    if by_rate or level.merge.by_learning_rate:
        yield (
            f"{strategy.name!r} goes by the learning rate, and a group of {optimizer} has none: give it one, "
            "such as Adafactor(..., lr=1e-3, relative_step=False), or attach 'localsgd' or 'diloco'"
        )


def scaler(spec: AttachSpec) -> Iterator[str]:
    """It is a GradScaler, and the strategy works with it if it scales."""
    strategy, scaler = spec.strategy, spec.scaler
    if scaler is not None and not isinstance(scaler, GradScaler):
        yield (
            f"scaler={scaler!r} is no torch.amp.GradScaler: give attach the one that scales the loss, or none"
        )
    if scaler is None or not scaler.is_enabled():
        return
    near = strategy.levels[0]
    if near.independent:
        yield (
            f"with {strategy.name!r} nobody waits for anybody, and a scaler skips steps that all have to "
            f"know of: train in bfloat16 without a scaler, or attach 'ps'"
        )
    if near.subject == "gradient" and near.overlap.steps > 0:
        yield (
            f"{strategy.name!r} gives a step the mean of the step before, which may be scaled by another "
            "factor, and whose overflow would be known too late to pass over it: train in bfloat16 without "
            "a scaler, or write overlap=Bucketwise()"
        )
    if near.overlap.layerwise:
        yield (
            f"{strategy.name!r} sends a gradient before all of them are known to be finite, and a scaler "
            "passes over a step where one is not: train in bfloat16 without a scaler, or attach 'dense'"
        )


def numbers(spec: AttachSpec) -> None:
    """Epochs have lengths, and the strategy is given those that it needs."""
    epoch_length.check_given(spec)


def weight(spec: AttachSpec) -> Iterator[str]:
    """The weight is a number above 0, and the strategy weighs replicas."""
    strategy, weight = spec.strategy, spec.weight
    if weight is None:
        return
    if not spec.periodic:
        yield (f"weight={weight!r} is for strategies that average replicas, and {strategy.name!r} does not")
    if any(level.topology.in_pairs for level in strategy.levels):
        yield (
            f"weight={weight!r} with {strategy.name!r} is not possible, as two replicas meet halfway: leave "
            "it out, or attach localsgd, say"
        )
    if any(level.merge.mixes for level in strategy.levels):
        yield (
            f"weight={weight!r} with {strategy.name!r} is not possible, as each replica mixes with a few "
            "others, whose weights add up to something else for each: leave it out, or attach localsgd, say"
        )
    if any(level.merge.keeps_unsent for level in strategy.levels):
        yield (
            f"weight={weight!r} with {strategy.name!r} is not possible, as what a replica keeps for itself "
            f"is not weighed: leave it out, or attach localsgd, say"
        )
    if not (checks.is_real(weight) and weight > 0):
        yield (f"weight={weight!r} is not possible: write a number above 0, such as the rank's samples")


def reduction(spec: AttachSpec) -> Iterator[str]:
    """The reduction is "mean" or "sum", and a sum is only for the gradients of shards."""
    checks.one_of("reduction", spec.reduction, ("mean", "sum"))
    if spec.reduction == "sum" and (spec.sharded is None or spec.periodic):
        yield (
            "reduction='sum' is for the gradients of sharded models (FSDP2), and "
            f"{spec.strategy.name!r} averages "
            f"{'parameters' if spec.periodic else 'those of DDP, which divides them'}: leave it out, "
            "and divide the loss by the samples of this replica"
        )


def seed(spec: AttachSpec) -> None:
    """It is one."""
    checks.whole("seed", spec.seed, 0, MOST_SEED, "it is the same on every rank")


RULES: tuple[Callable[[AttachSpec], Iterator[str] | None], ...] = (
    shards,
    equal_again,
    model,
    layerwise,
    unused,
    pairs,
    ranks,
    optimizers,
    scaler,
    numbers,
    weight,
    reduction,
    seed,
)
"""The rules, in order: of several broken ones, the error names the first."""


# ---- parameter servers ---------------------------------------------------------------------------------


def needs_servers(strategy: AnyStrategy) -> bool:
    """Whether a strategy cannot do without parameter servers."""
    return any(level.server is not None and not level.topology.in_pairs for level in strategy.levels)


def uses_servers(strategy: AnyStrategy) -> bool:
    """Whether a strategy uses parameter servers if there are some."""
    return needs_servers(strategy) or any(level.topology.at_servers for level in strategy.levels)


def _with_servers(spec: AttachSpec) -> AnyStrategy:
    """The strategy, with `Star` as its topology if it uses servers and there are some.

    Raises:
        AttachError: there are none and the strategy needs some, or the other way round.
        ConfigError: one is no address.
    """
    strategy = spec.strategy
    if not uses_servers(strategy):
        if spec.servers:
            raise AttachError(
                f"servers={spec.servers!r} with {strategy.name!r} would do nothing, as it has no parameter "
                "server: leave them out, or attach 'ps', say"
            )
        return strategy
    from tacit.stores.client.placement import find_servers
    from tacit.topologies.star import Star

    where, needs = find_servers(spec.servers), needs_servers(strategy)
    if not where and needs:
        raise AttachError(
            f"{strategy.name!r} needs a parameter server, and there is none: run with --servers 1 (tacit "
            "run, tacit compare), or start `python -m tacit.stores.server --host HOST --port 29600 "
            f"--workers N` and write attach(..., servers=['HOST:29600']), or {SERVERS}=HOST:29600"
        )
    if isinstance(strategy, Strategy) and where and not needs:
        return replace(strategy, topology=Star())
    return strategy
