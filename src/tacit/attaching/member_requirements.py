"""Whether members that come and go can train this model by this strategy."""

from __future__ import annotations

from torch.amp import GradScaler

from tacit.contracts import WORLD
from tacit.errors import AttachError
from tacit.levels.spec import AttachSpec
from tacit.members.roster import Members
from tacit.model.sharded_model import ShardedModel
from tacit.optimizer_hooks import momentum
from tacit.strategy import AnyStrategy, AutoStrategy
from tacit.transports.process_groups import ranks_of


def check_strategy(strategy: AnyStrategy) -> None:
    """Refuse a strategy that members cannot have, whatever they train.

    Raises:
        AttachError: the message says what to write.
    """
    if isinstance(strategy, AutoStrategy):
        raise AttachError("'auto' does not choose for members that come and go: name one, such as 'lowbit'")
    if any(
        level.subject == "nothing"
        or level.independent
        or level.server is not None
        or level.topology.scope != WORLD
        or level.overlap.layerwise
        or (level.late and level.subject == "gradient")
        for level in strategy.levels
    ):
        raise AttachError(
            f"{strategy.name!r} is not for members that come and go: attach one that exchanges by "
            "collectives of all replicas, such as 'lowbit', 'diloco', 'localsgd', 'dense' or 'topk'"
        )
    if any(level.compressor.takes_momentum is not None for level in strategy.levels):
        raise _takes_momentum(strategy)


def _takes_momentum(strategy: AnyStrategy) -> AttachError:
    return AttachError(
        f"{strategy.name!r} takes the optimizer's momentum over, which members that come and go do not pass "
        "on: attach 'topk', 'powersgd' or 'lowbit'"
    )


def member_specs(spec: AttachSpec, members: Members) -> list[AttachSpec]:
    """The arguments of attach for each shard that this process has: one, but where it stands for several.

    Raises:
        AttachError: members cannot do that; the message says what to write.
    """
    _check(spec, members)
    if spec.sharded is not None or members.shards == 1:
        return [spec]
    from tacit.levels.whole_as_shards import shards_of

    return shards_of(spec, members.shards)


def _check_semi_synchronous(spec: AttachSpec, members: Members) -> None:
    levels = spec.strategy.levels
    first = levels[0]
    fits = len(levels) == 1 and first.subject == "delta" and (first.rounds.sync_every or 0) > 1
    weighs = not (first.merge.keeps_unsent or first.merge.mixes or first.momentum != "local")
    if not fits or not weighs or first.late or first.parts > 1 or first.rounds.observed_metrics:
        raise AttachError(
            f"semi_synchronous=True with {spec.strategy.name!r} is not possible, as its means are not of "
            "parameters, weighed, of all and at once, every so many steps: attach 'localsgd:sync_every=32', "
            "'diloco', 'sparseloco' or 'muloco', or leave it out"
        )
    if spec.sharded is not None or members.shards > 1:
        raise AttachError(
            "semi_synchronous=True is not for members that FSDP2 shards, whose ranks step together: leave it "
            "out"
        )


def _check(spec: AttachSpec, members: Members) -> None:
    check_strategy(spec.strategy)
    if members.semi_synchronous:
        _check_semi_synchronous(spec, members)
    if spec.probe:
        raise AttachError("probe= measures links of ranks that stay, and members come and go: leave it out")
    ranks = spec.model.process_group.size()
    if ranks > 1:
        raise AttachError(
            f"members= is for replicas that are processes of their own, and here {ranks} ranks share a "
            "DistributedDataParallel: start each replica by itself, by torchrun --standalone "
            "--nproc-per-node 1 train.py; or shard it among its ranks by FSDP2, fully_shard(model)"
        )
    if spec.sharded is not None:
        _check_sharded(spec.sharded, members)
    if spec.sharded is not None or members.shards > 1:
        _check_shards(spec.strategy, members)
    if momentum.planned(spec.strategy, spec.policy, spec.optimizers, spec.named) is not None:  # by policy=
        raise _takes_momentum(spec.strategy)
    gradients = any(level.subject == "gradient" for level in spec.strategy.levels)
    fused = [each for each in spec.optimizers if any(group.get("fused") for group in each.param_groups)]
    if isinstance(spec.scaler, GradScaler) and spec.scaler.is_enabled() and gradients and fused:
        raise AttachError(
            f"with scaler= and members {spec.strategy.name!r} exchanges gradients before the optimizer's "
            f"step, and a fused {type(fused[0]).__name__} unscales them in it, each by its scale: make it "
            "with fused=False, or train in bfloat16 without a scaler"
        )


def _check_sharded(model: ShardedModel, members: Members) -> None:
    """Refuse replicas of several ranks that are no world of their own, or that say they are others."""
    world = len(ranks_of())
    if model.shards != world:
        raise AttachError(
            f"members= is for replicas that are a world of their own, and here a replica has {model.shards} "
            f"of {world} ranks: start each replica by itself, by torchrun --standalone --nproc-per-node "
            f"{model.shards} train.py, and shard it among all its ranks, fully_shard(model)"
        )
    if members.shards not in (1, model.shards):
        raise AttachError(
            f"shards={members.shards} is for replicas of one process, and {model.shards} ranks share this "
            f"one: leave it out, and write Members(shards={model.shards}) there"
        )


def _check_shards(strategy: AnyStrategy, members: Members) -> None:
    """Refuse what cannot be where each shard is exchanged by itself."""
    for level in strategy.levels:
        if level.subject == "gradient" or level.rounds.observed_metrics:
            raise AttachError(
                f"{strategy.name!r} is not for members that FSDP2 shards: attach one whose replicas "
                "step alone, by a period that does not depend on measurements, such as 'lowbit', 'diloco' or "
                "'localsgd'"
            )
    if members.quorum is not None:
        raise AttachError(
            f"quorum={members.quorum} is not for members that FSDP2 shards, whose ranks may be late one by "
            "one: leave it out"
        )
