"""Adam for a compressor that applies its momentum: the variance is frozen, and steps use that momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tacit.contracts import Momentum
from tacit.errors import AttachError
from tacit.optimizer_hooks.taken_momentum import Taken
from tacit.optimizer_hooks.variance_guard import KeepingVariance, Kept, Undo, check_adam, variance_of


class FrozenAdam(KeepingVariance, Taken):
    """Makes Adam step by the exchanged momentum while its variance is frozen (see `Momentum.moving`).

    `betas[0]` is 0 then, so that Adam uses the gradient as its momentum. Between two steps Adam's state holds
    the bias-corrected variance v, with unchanged bits, also in a checkpoint. A step divides by the root of
    beta2 v + (1 - beta2) m^2, as Adam forms it. From `restore` on Adam goes on with both.

    For an entry that had no gradient yet, such as the row of a rare token, v is 0, and steps would be equally
    large however small m is. So v is raised to `least_variance` of m: no step is then larger than a step of
    Adam can be.

    Raises:
        AttachError: an optimizer is not Adam or AdamW, or its `betas[0]` is another one.
    """

    field, buffer = "momentum", "exp_avg"

    def __init__(
        self, momentum: Momentum, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
    ) -> None:
        KeepingVariance.__init__(self, optimizers, named)
        Taken.__init__(self, momentum, self._optimizers, named)
        for optimizer, group in self._groups:
            self._check(optimizer, group)

    def __str__(self) -> str:
        return (
            f"momentum {self.momentum.factor:g} taken over from Adam, whose variance stays, from step "
            f"{self.momentum.freeze_step} on"
        )

    def _has_momentum(self, group: Mapping[str, Any]) -> bool:
        return True

    def _check(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        beta = self.momentum.factor
        instead = "'int8', which leaves any optimizer as it is"
        check_adam(optimizer, group, "the strategy sends Adam's momentum", instead)
        saved = group["betas"][0] == 0 and len(optimizer.state) > 0  # it was set to 0 by an earlier session
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
        """Begin to change Adam's steps while the variance is frozen."""
        self._step = step
        self._guard()

    def _change(self, optimizer: Optimizer) -> Undo | None:
        for _, group in self._groups_of(optimizer):
            if group["betas"][0] not in (0, self.momentum.factor):
                raise AttachError(
                    f"the optimizer's betas[0] was set to {group['betas'][0]}, and the strategy applies "
                    f"momentum with beta={self.momentum.factor:g}: leave it; schedulers such as OneCycleLR "
                    "take cycle_momentum=False"
                )
        if not self.momentum.keeps_variance(self._step()):
            self._release(optimizer)
            return None
        scale = getattr(optimizer, "grad_scale", None)
        squared = 1.0 if scale is None else float(scale) ** 2
        found, momenta, floors, shares = list[Kept](), [], [], []
        for group, p, name in self._parameters(optimizer):
            if p.grad is None and variance_of(p, optimizer) is None:
                continue
            kept = self._keep(optimizer, p, name, group, self.momentum.freeze_step)
            if p.grad is None:
                continue
            beta = group["betas"][1]
            share = 1 - beta**kept.steps  # Adam will divide by its bias correction, unless that is 1
            found.append(kept)
            momenta.append(p.grad)
            floors.append(least_variance(self.momentum.factor, beta) / squared)
            shares.append(share if share < 1 - 2**-25 else 1.0)
        self._set_beta(optimizer, 0.0)
        return self._raise(found, momenta, floors, shares)

    def _since(self, there: Tensor, name: str, group: Mapping[str, Any], steps: int) -> int:
        if not _is_kept(group):
            there.div_(1 - group["betas"][1] ** steps)
        return steps

    def _release(self, optimizer: Optimizer) -> None:
        """Give Adam the variance without bias correction, from which it goes on."""
        for group, p, name in self._parameters(optimizer):
            state = optimizer.state.get(p, {})
            if _is_kept(group) and "exp_avg_sq" in state:
                state["exp_avg_sq"].mul_(1 - group["betas"][1] ** int(state["step"]))
            self._kept.pop(name, None)
        self._set_beta(optimizer, self.momentum.factor)

    def _set_beta(self, optimizer: Optimizer, beta: float) -> None:
        for _, group in self._groups_of(optimizer):
            group["betas"] = (beta, group["betas"][1])

    def expect(self, names: AbstractSet[str]) -> None:
        """Do nothing: the variance is in the optimizer's state."""

    def saved_state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}


def least_variance(beta1: float, beta2: float) -> float:
    """The least ratio of Adam's variance to its squared momentum, for any gradients, by Cauchy and Schwarz.

    m = (1 - beta1) sum of beta1^k g_k and v = (1 - beta2) sum of beta2^k g_k^2, so that
    m^2 <= v (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)), as long as beta1^2 < beta2. At least it is
    what a single gradient as large as m makes.
    """
    return (1 - beta2) * max(1.0, (1 - beta1**2 / beta2) / (1 - beta1) ** 2)


def _is_kept(group: Mapping[str, Any]) -> bool:
    """Whether the variances of this group are bias-corrected: frozen now, or when they were saved."""
    return bool(group["betas"][0] == 0)
