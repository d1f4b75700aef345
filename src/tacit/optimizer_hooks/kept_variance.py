"""Adam's variance, frozen between renewals by mean gradients, for replicas that step alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.optimizer_hooks.variance_guard import (
    KeepingVariance,
    Kept,
    Undo,
    check_adam,
    gradient_of,
    variance_of,
    with_decay,
)
from tacit.rounds import Renewals
from tacit.torch_compat import add_squares_of_each_


class KeptVariance(KeepingVariance):
    """Makes Adam step by a variance that is equal on all replicas, and by the momentum of each.

    A replica's gradient is of a smaller batch, so its squares are larger than those of the mean gradient, and
    noisier, and each replica would divide by others. So Adam's variance v moves only in the steps of
    `renewals`, in which a nearer level averages gradients. In every other step Adam divides by the root of
    beta2 v + (1 - beta2) g^2 / P, with this replica's gradient g and P replicas: so the step of a gradient
    that outgrows the old variance is bounded. After the step it has v again. The idea is 0/1 Adam's (Lu et
    al., ICLR 2023, arXiv 2202.06009), which divides by the root of v itself.

    For an entry that had no gradient yet, such as the row of a rare token, v is 0, and g is 0 again in the
    next step, while the momentum is not. So v is raised to (1 - beta2) g^2 / P, on this replica.

    Args:
        renewals: when it moves. optimizers: Adam or AdamW. named: the parameters.
        replicas: of whose gradients v is. step: how many attempts have ended, when one is about to step.

    Raises:
        AttachError: an optimizer has no variance that can be kept.
    """

    def __init__(
        self,
        renewals: Renewals,
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Tensor],
        replicas: int,
        step: Callable[[], int],
    ) -> None:
        super().__init__(optimizers, named)
        self._renewals, self._replicas, self._step = renewals, replicas, step
        refuse_optimizers(renewals, optimizers, named)
        self._saved: dict[str, int] = {}
        """From a checkpoint: the last step in which the optimizers' variances, loaded before or after, moved.
        """
        self._guard()

    def count_by(self, step: Callable[[], int]) -> None:
        """Count attempts by `step` from now on."""
        self._step = step

    def _change(self, optimizer: Optimizer) -> Undo | None:
        if self._renewals.moves(self._step()):
            self._release(optimizer)
            return None
        found = list[Kept]()
        gradients, floors, shares, factors = [], [], [], []
        for group, p, name in self._parameters(optimizer):
            if p.grad is None:
                continue
            kept = self._keep(optimizer, p, name, group, self._renewals.freeze_step)
            beta = float(group["betas"][1])
            now = 1 - beta ** (kept.steps + 1)  # Adam's bias correction, as v began at 0
            share = max(
                now / self._replicas, 4 * torch.finfo(kept.there.dtype).eps
            )  # below, rounding dominates
            found.append(kept)
            gradients.append(with_decay(gradient_of(p, optimizer), p, group))
            known = 1 - beta**kept.since
            floors.append((1 - beta) * known / self._replicas)
            shares.append(now / known)
            factors.append((share - 1) * (1 - beta) / beta)
        undo = self._raise(found, gradients, floors, shares)
        if found:
            add_squares_of_each_([kept.there for kept in found], gradients, factors)
        return undo

    def _since(self, there: Tensor, name: str, group: Mapping[str, Any], steps: int) -> int:
        return self._saved.pop(name, steps)

    def _release(self, optimizer: Optimizer) -> None:
        """Give Adam the variance without bias correction, from which it goes on."""
        for group, p, name in self._parameters(optimizer):
            there = variance_of(p, optimizer)
            kept, since = self._kept.pop(name, None), self._saved.pop(name, None)
            if kept is not None and kept.there is there:
                since = kept.since
            if there is not None and since is not None:
                beta, steps = float(group["betas"][1]), int(optimizer.state[p]["step"])
                there.mul_((1 - beta**steps) / (1 - beta**since))

    def saved_state(self) -> dict[str, Any]:
        """The state for a checkpoint: plain values, equal on all ranks."""
        return {"since": {**self._saved, **{name: each.since for name, each in self._kept.items()}}}

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Go on from a state of `saved_state`, with optimizers that have or will have those variances."""
        self._kept.clear()
        self._saved = dict(kept.get("since", {}))


def refuse_optimizers(
    renewals: Renewals, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
) -> None:
    """Raise an `AttachError` where an optimizer of these parameters has no variance that can be kept."""
    mine = {id(p) for p in named.values()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(p) in mine for p in group["params"]):
                wants = f"variance={renewals} keeps Adam's variance"
                check_adam(optimizer, group, wants, "'lowbit', which goes with any optimizer")
