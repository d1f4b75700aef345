"""Adam's variance as mean gradients have moved it last, where replicas step by gradients of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from tacit.errors import AttachError
from tacit.optimizer_hooks.closures import around_steps
from tacit.optimizer_hooks.frozen_adam import refuse_options, too_late
from tacit.optimizer_hooks.scaled_variance import skips, variance_of, with_decay
from tacit.rounds import Renewals
from tacit.torch_compat import add_squares_of_each_, copy_each_, multiply_each_, raise_to_squares_


@dataclass(slots=True)
class Kept:
    """The variance of a parameter while it is kept.

    Attributes:
        there: Adam's own tensor; `copy`: its values between two steps.
        since: how many steps Adam had taken when it moved last; `steps`: how many it has taken now.
    """

    there: Tensor
    copy: Tensor
    since: int
    steps: int

    def stepped(self) -> None:
        """Adam has taken a step."""
        self.steps += 1


class KeptVariance:
    """Has Adam step by a variance that is equal on all replicas, and by the momentum of each.

    A replica's own gradient is of a smaller batch, so that its squares are larger than those of the mean
    gradient, and noisier, and each replica would divide by others. So Adam's variance v moves only in the
    steps of `renewals`, in which a nearer level averages gradients. In every other step Adam is handed what
    it makes beta2 v + (1 - beta2) g^2 / P of, with this replica's gradient g and P replicas: so the step of a
    gradient that outgrows the old variance is bounded. Behind the step it has v again. The idea is 0/1 Adam's
    (Lu et al., ICLR 2023, arXiv 2202.06009), which divides by the root of v itself.

    Of an entry that had no gradient yet, such as the row of a rare token, v is 0, and g is again in the next
    step, while its momentum is not. So v rises to (1 - beta2) g^2 / P where it is less, on this replica.

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
        self._renewals, self._replicas, self._step = renewals, replicas, step
        self._names = {id(p): name for name, p in named.items()}
        self._optimizers = [each for each in optimizers if any(True for _ in self._parameters(each))]
        refuse_optimizers(renewals, optimizers, named)
        self._kept: dict[str, Kept] = {}
        self._saved: dict[str, int] = {}
        """By a checkpoint: when the variances moved last that the optimizers have, or will have."""
        self._changed: dict[int, list[Kept]] = {}
        self._handles = around_steps(self._optimizers, self._before, self._behind)

    def count_by(self, step: Callable[[], int]) -> None:
        """From now on `step` tells how many attempts have ended."""
        self._step = step

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
        """With their groups as they are now: loading a state gives an optimizer others."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._names:
                    yield group, p, self._names[id(p)]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        self._put_back(optimizer)  # of a step that has raised
        if skips(optimizer):
            return
        if self._renewals.moves(self._step()):
            self._release(optimizer)
            return
        scale = getattr(optimizer, "grad_scale", None)
        found: list[Kept] = []
        gradients, floors, shares, factors = [], [], [], []
        for group, p, name in self._parameters(optimizer):
            if p.grad is None:
                continue
            kept = self._of(optimizer, p, name)
            beta = float(group["betas"][1])
            now = 1 - beta ** (kept.steps + 1)  # what Adam divides by, as v began at 0
            share = max(now / self._replicas, 4 * torch.finfo(kept.there.dtype).eps)  # below, rounding counts
            found.append(kept)
            gradients.append(with_decay(p.grad if scale is None else p.grad / scale, p.detach(), group))
            known = 1 - beta**kept.since
            floors.append((1 - beta) * known / self._replicas)
            shares.append(now / known)
            factors.append((share - 1) * (1 - beta) / beta)
        if found:
            self._changed[id(optimizer)] = found
            there, copies = [kept.there for kept in found], [kept.copy for kept in found]
            raise_to_squares_(copies, there, gradients, floors)
            multiply_each_(there, shares)
            add_squares_of_each_(there, gradients, factors)

    def _of(self, optimizer: Optimizer, p: Tensor, name: str) -> Kept:
        """The variance of a parameter; noted anew where a checkpoint has brought another."""
        there, kept = variance_of(p, optimizer), self._kept.get(name)
        if there is None:
            raise too_late(name, self._renewals.freeze_step)
        if kept is None or kept.there is not there:
            steps = int(optimizer.state[p]["step"])
            kept = self._kept[name] = Kept(there, there.clone(), self._saved.pop(name, steps), steps)
        return kept

    def _behind(self, optimizer: Optimizer, *_: Any) -> None:
        for kept in self._put_back(optimizer):
            kept.stepped()

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer) -> list[Kept]:
        """Have the optimizer's state hold what is kept; returns what a step has changed."""
        found = self._changed.pop(id(optimizer), [])
        if found:
            copy_each_([kept.there for kept in found], [kept.copy for kept in found])
        return found

    @torch.no_grad()
    def _release(self, optimizer: Optimizer) -> None:
        """Have Adam find the variance that it would have after so many steps, which it then moves."""
        for group, p, name in self._parameters(optimizer):
            there = variance_of(p, optimizer)
            kept, since = self._kept.pop(name, None), self._saved.pop(name, None)
            if kept is not None and kept.there is there:
                since = kept.since
            if there is not None and since is not None:
                beta, steps = float(group["betas"][1]), int(optimizer.state[p]["step"])
                there.mul_((1 - beta**steps) / (1 - beta**since))

    def restore(self) -> None:
        """Have Adam go on with the variance that it has."""
        if self._handles:
            for each in self._optimizers:
                self._put_back(each)
                self._release(each)
        self.close()

    def close(self) -> None:
        """Leave the optimizers alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def kept(self) -> dict[str, Any]:
        """Plain values, equal on all ranks."""
        return {"since": {**self._saved, **{name: each.since for name, each in self._kept.items()}}}

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `kept` gave, with optimizers that have or will have those variances."""
        self._kept.clear()
        self._saved = dict(kept.get("since", {}))


def refuse_optimizers(
    renewals: Renewals, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
) -> None:
    """Raise an `AttachError` where an optimizer of these parameters has no variance that can be kept."""
    mine = {id(p) for p in named.values()}
    for optimizer in optimizers:
        groups = [group for group in optimizer.param_groups if any(id(p) in mine for p in group["params"])]
        if groups and not isinstance(optimizer, Adam):
            kind = type(optimizer).__name__
            raise AttachError(
                f"variance={renewals} keeps Adam's variance, and {kind} is neither torch.optim.Adam nor "
                "AdamW: use one of them; or attach 'lowbit', which goes with any optimizer"
            )
        for group in groups:
            refuse_options(optimizer, group)
