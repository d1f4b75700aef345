"""Whether members that come and go can train this model by this strategy."""

from __future__ import annotations

from tacit.contracts import WORLD
from tacit.errors import AttachError
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks import momentum
from tacit.strategy import AutoStrategy


def check_members(spec: AttachSpec) -> None:
    """Refuse what members cannot do.

    Raises:
        AttachError: the message says what to write.
    """
    if isinstance(spec.strategy, AutoStrategy):
        raise AttachError("'auto' does not choose for members that come and go: name one, such as 'lowbit'")
    if spec.probe:
        raise AttachError("probe= measures links of ranks that stay, and members come and go: leave it out")
    levels = spec.strategy.levels
    ranks = spec.model.process_group.size()
    if spec.ddp is None or ranks > 1:
        raise AttachError(
            f"members= is for replicas that are processes of their own, and here {ranks} ranks share a "
            "DistributedDataParallel: start each replica by itself, by torchrun --standalone "
            "--nproc-per-node 1 train.py"
        )
    if any(
        level.subject == "nothing"
        or level.independent
        or level.server is not None
        or level.topology.scope != WORLD
        or level.overlap.layerwise
        or (level.late and level.subject == "gradient")
        for level in levels
    ):
        raise AttachError(
            f"{spec.strategy.name!r} is not for members that come and go: attach one that exchanges by "
            "collectives of all replicas, such as 'lowbit', 'diloco', 'localsgd', 'dense' or 'topk'"
        )
    if momentum.planned(spec.strategy, spec.policy, spec.optimizers, spec.named) is not None:
        raise AttachError(
            f"{spec.strategy.name!r} takes the optimizer's momentum over, which members that come and go do "
            "not pass on: attach 'topk', 'powersgd' or 'lowbit'"
        )
    if spec.scaler is not None and spec.scaler.is_enabled():
        raise AttachError("scaler= is not supported with members: train in bfloat16, which needs none")
