"""The momentum that is taken from the optimizers, as a compressor applies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from tacit.contracts import Compressor, Momentum
from tacit.errors import AttachError
from tacit.session.buckets import Policy, choice, exempting
from tacit.strategy import AnyStrategy

if TYPE_CHECKING:
    from tacit.optimizer_hooks.taken_momentum import Taken


def planned(
    strategy: AnyStrategy, policy: Policy | None, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
) -> Taken | None:
    """The momentum that is to be taken from the optimizers; None: no compressor applies any.

    Raises:
        AttachError: it cannot be taken.
    """
    for level in strategy.levels:
        if level.subject == "delta" and level.compressor.takes_momentum is not None:
            raise AttachError(
                f"{level.compressor} applies momentum to gradients, and with subject='delta' the optimizer "
                "applies it in every local step: leave that wrapper out"
            )
    nearest = strategy.levels[0]
    if nearest.subject != "gradient":
        return None
    policy = policy or exempting(nearest.compressor)
    momentum = _common({name: choice(name, p, policy) for name, p in named.items()})
    if momentum is None:
        return None
    if momentum.freeze_step is None:
        from tacit.optimizer_hooks.sgd_momentum import TakenMomentum

        return TakenMomentum(momentum, optimizers, named)
    from tacit.optimizer_hooks.frozen_adam import FrozenAdam

    return FrozenAdam(momentum, optimizers, named)


def _common(chosen: Mapping[str, Compressor]) -> Momentum | None:
    """The momentum that all of the parameters' compressors apply."""
    found: dict[Momentum | None, str] = {}
    for name, compressor in chosen.items():
        found.setdefault(compressor.takes_momentum, name)
    if len(found) > 1:
        from tacit.optimizer_hooks.taken_momentum import words

        (one, first), (other, second), *_ = found.items()
        raise AttachError(
            f"{first} has a compressor with {words(one)} and {second} one with {words(other)}, and the "
            "optimizer's momentum is taken from all or from none: put the same wrapper with the same "
            "numbers around each of them, around Dense() for what stays dense"
        )
    return next(iter(found), None)
