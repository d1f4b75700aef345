"""Where the compressor applies Adam's momentum, Adam keeps its variance, and steps by what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.contracts import Momentum
from tacit.errors import AttachError
from tacit.optimizer_hooks.closures import around_steps
from tacit.optimizer_hooks.scaled_variance import skips
from tacit.optimizer_hooks.taken_momentum import Taken
from tacit.torch_compat import copy_each_, raise_to_squares_


@dataclass(slots=True)
class FrozenVariance:
    """The variance of a parameter: Adam's own tensor, what it is corrected for its bias, and Adam's steps."""

    there: Tensor
    corrected: Tensor
    steps: int

    def stepped(self) -> None:
        """Adam has taken a step."""
        self.steps += 1

    def biased(self, beta: float) -> None:
        """Have Adam find what it would have after so many steps; where that is the same, leave it."""
        factor = 1 - beta**self.steps
        if factor < 1 - 2**-25:
            torch.mul(self.corrected, factor, out=self.there)


class FrozenAdam(Taken):
    """While the variance is kept, Adam steps by a given momentum (`Momentum.moving` says when).

    `betas[0]` is 0 then, so that Adam takes the gradient as its momentum. Between two steps Adam's state has
    the variance v corrected for its bias, to the bit the same, also in a checkpoint. A step divides by the
    root of beta2 v + (1 - beta2) m^2, as Adam forms it. From `restore` on Adam goes on with both.

    Of an entry that had no gradient yet, such as the row of a rare token, v is 0, and steps would be equally
    large however small m is. So v rises to `least_variance` of m where it is less: no step is then larger
    than one that Adam itself can take.

    Raises:
        AttachError: an optimizer is not Adam or AdamW, or its `betas[0]` is another one.
    """

    field, buffer = "momentum", "exp_avg"

    def __init__(
        self, momentum: Momentum, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
    ) -> None:
        super().__init__(momentum, optimizers, named)
        for optimizer, group in self._groups:
            self._check(optimizer, group)
        self._handles: list[RemovableHandle] = []
        self._kept: dict[int, FrozenVariance] = {}
        self._is_frozen = False

    def __str__(self) -> str:
        return (
            f"momentum {self.momentum.factor:g} taken over from Adam, whose variance stays, from step "
            f"{self.momentum.freeze_step} on"
        )

    def _has_momentum(self, group: Mapping[str, Any]) -> bool:
        return True

    def _check(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        kind, beta = type(optimizer).__name__, self.momentum.factor
        if not isinstance(optimizer, Adam):
            raise AttachError(
                f"the strategy sends Adam's momentum, and {kind} is neither torch.optim.Adam nor AdamW: use "
                "one of them; or attach 'int8', which leaves any optimizer as it is"
            )
        refuse_options(optimizer, group)
        saved = group["betas"][0] == 0 and len(optimizer.state) > 0  # while it was taken
        if group["betas"][0] != beta and not saved:
            raise AttachError(
                f"the optimizer has betas[0]={group['betas'][0]}, the strategy beta={beta:g}: give both the "
                f"same, such as onebit-adam:beta={group['betas'][0]}"
            )
        strangers = sum(p.requires_grad and id(p) not in self._names for p in group["params"])
        if strangers:
            raise AttachError(
                f"{strangers} parameters of a group are not among those that are exchanged, and would lose "
                "their momentum: put them in a group of their own"
            )

    def take(self, step: Callable[[], int]) -> None:
        """Have Adam's steps changed while the variance is kept."""

        def before(optimizer: Optimizer) -> None:
            self._is_frozen = self.momentum.keeps_variance(step())
            for _, group in self._groups_of(optimizer):
                self._check_beta(group)
                if self._is_frozen:
                    self._keep(optimizer, group)
                else:
                    self._release(optimizer, group)
                group["betas"] = (0.0 if self._is_frozen else self.momentum.factor, group["betas"][1])

        def after(optimizer: Optimizer, *_: Any) -> None:
            if self._is_frozen:
                self._put_back(optimizer)

        self._handles += around_steps(self._optimizers, before, after)

    def _check_beta(self, group: Mapping[str, Any]) -> None:
        if group["betas"][0] not in (0, self.momentum.factor):
            raise AttachError(
                f"the optimizer's betas[0] was set to {group['betas'][0]}, and the strategy applies momentum "
                f"with beta={self.momentum.factor:g}: leave it; schedulers such as OneCycleLR take "
                "cycle_momentum=False"
            )

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Note the variances, anew where a checkpoint has brought others, and have Adam step by them."""
        beta = group["betas"][1]
        found, momenta = [], []
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            there = state.get("exp_avg_sq")
            if there is None:
                self._check_late(p)
                continue
            kept = self._kept.get(id(p))
            if kept is None or kept.there is not there:
                steps = int(state["step"])
                if not _is_kept(group):
                    there.div_(1 - beta**steps)
                kept = self._kept[id(p)] = FrozenVariance(there, there.clone(), steps)
            if p.grad is not None:
                found.append(kept)
                momenta.append(p.grad)
        if found and not skips(optimizer):
            self._raise(optimizer, group, found, momenta)
        for kept in found:
            kept.biased(beta)

    def _raise(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        found: Sequence[FrozenVariance],
        momenta: list[Tensor],
    ) -> None:
        """Have no variance be less than what is the least that Adam has beside these momenta."""
        least = least_variance(self.momentum.factor, group["betas"][1])
        scale = getattr(optimizer, "grad_scale", None)
        there, corrected = [kept.there for kept in found], [kept.corrected for kept in found]
        factor = least if scale is None else least / float(scale) ** 2
        raise_to_squares_(corrected, there, momenta, [factor] * len(found))

    def _check_late(self, p: Tensor) -> None:
        if p.grad is not None and id(p) in self._names:
            raise too_late(self._names[id(p)], self.momentum.freeze_step)

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer) -> None:
        for _, group in self._groups_of(optimizer):
            found = [self._kept[id(p)] for p in group["params"] if p.grad is not None and id(p) in self._kept]
            if found:
                copy_each_([kept.there for kept in found], [kept.corrected for kept in found])
            for kept in found:
                kept.stepped()

    @torch.no_grad()
    def _release(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Have Adam find the variance that it would have after so many steps, which it then moves."""
        for p in group["params"] if _is_kept(group) else ():
            state = optimizer.state.get(p, {})
            if "exp_avg_sq" in state:
                state["exp_avg_sq"].mul_(1 - group["betas"][1] ** int(state["step"]))
            self._kept.pop(id(p), None)

    def restore(self) -> None:
        """Have Adam go on with the momentum and the variance that it has."""
        for handle in self._handles:
            handle.remove()
        for optimizer, group in self._groups:
            self._release(optimizer, group)
            group["betas"] = (self.momentum.factor, group["betas"][1])

    def expect(self, names: AbstractSet[str]) -> None:
        """Nothing: the variance is in the optimizer's own state."""

    def kept(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}


def least_variance(beta1: float, beta2: float) -> float:
    """The least variance of Adam, of a squared momentum: whatever the gradients were, by Cauchy and Schwarz.

    m = (1 - beta1) sum of beta1^k g_k and v = (1 - beta2) sum of beta2^k g_k^2, so that
    m^2 <= v (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)), as long as beta1^2 < beta2. At least it is
    what a single gradient as large as m makes.
    """
    return (1 - beta2) * max(1.0, (1 - beta1**2 / beta2) / (1 - beta1) ** 2)


def refuse_options(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raise an `AttachError` for options with which Adam's variance cannot be kept."""
    for option in ("amsgrad", "capturable", "differentiable"):
        if group[option]:
            raise AttachError(
                f"{type(optimizer).__name__} with {option}=True has no variance that could be kept as it is: "
                f"leave {option} out"
            )


def too_late(name: str, freeze_step: int | None) -> AttachError:
    """What is to be raised where a parameter has its first gradient behind `freeze_step`."""
    return AttachError(
        f"{name} has its first gradient in step {freeze_step} or later, so that it has no variance to keep: "
        "write a larger freeze_step, or freeze it"
    )


def _is_kept(group: Mapping[str, Any]) -> bool:
    """Whether the variances of this group are corrected for their bias: kept now, or when they were saved."""
    return bool(group["betas"][0] == 0)
