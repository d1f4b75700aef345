"""Sets the momentum of SGD to 0 while a compressor applies it, and restores it in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.contracts import Momentum
from tacit.errors import AttachError
from tacit.optimizer_hooks.closures import with_gradients
from tacit.optimizer_hooks.taken_momentum import Taken, words
from tacit.optimizer_hooks.weight_decay import DecayMomentum


class TakenMomentum(Taken):
    """The momentum of SGD, which is 0 from `take` to `restore`.

    In between, a step with momentum in such a group is an error: momentum would be applied twice.

    Raises:
        AttachError: an optimizer is not SGD, or its momentum is another one.
    """

    field, buffer = "velocity", "momentum_buffer"

    def __init__(
        self, momentum: Momentum, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
    ) -> None:
        super().__init__(momentum, optimizers, named)
        self._handles: list[RemovableHandle] = []
        for optimizer, group in self._groups:
            _check(momentum, optimizer, group)
        self._before = {id(p): group["momentum"] for _, group in self._groups for p in group["params"]}
        self._decay = DecayMomentum(momentum, named)
        self._decay.prepare(group for _, group in self._groups)

    def __str__(self) -> str:
        return f"{words(self.momentum)} taken over from SGD"

    def _has_momentum(self, group: Mapping[str, Any]) -> bool:
        return bool(group["momentum"])

    def take(self, step: Callable[[], int]) -> None:
        """Set the optimizers' momentum to 0."""
        for _, group in self._groups:
            group["momentum"] = 0
        hook = with_gradients(self._guard)
        self._handles = [each.register_step_pre_hook(hook) for each in self._optimizers]

    def _guard(self, optimizer: Optimizer) -> None:
        groups = [group for _, group in self._groups_of(optimizer)]
        for group in groups:
            if group["momentum"] != 0:
                raise AttachError(
                    f"the optimizer's momentum was set to {group['momentum']}, and the strategy applies "
                    "momentum: leave it at 0; schedulers such as OneCycleLR take cycle_momentum=False"
                )
        self._decay.before_step(optimizer, groups)

    def restore(self) -> None:
        """Restore the momentum. Its buffers are dropped, as they belong to the steps before `take`."""
        for handle in self._handles:
            handle.remove()
        for optimizer, group in self._groups:
            group["momentum"] = max(self._before.get(id(p), 0.0) for p in group["params"])
            for p in group["params"]:
                optimizer.state.get(p, {}).pop("momentum_buffer", None)

    def expect(self, names: AbstractSet[str]) -> None:
        """See `DecayMomentum.expect`."""
        self._decay.expect(names)

    def saved_state(self) -> dict[str, Tensor]:
        """See `DecayMomentum.saved_state`."""
        return self._decay.saved_state()


def _check(momentum: Momentum, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    if not isinstance(optimizer, SGD):
        raise AttachError(
            f"the strategy applies momentum, and that of {type(optimizer).__name__} cannot be switched off: "
            "use torch.optim.SGD; or attach 'lowbit', or with Adam or AdamW on DDP "
            "'onebit-adam:freeze_step=N' with N a fifth of the steps"
        )
    theirs = group["momentum"]
    if theirs == 0:
        return
    if "max_momentum" in group:  # set by OneCycleLR and CyclicLR
        raise AttachError(
            "a scheduler changes the optimizer's momentum, and that of the strategy stays: write "
            "OneCycleLR(..., cycle_momentum=False), or attach 'topk', which leaves the optimizer as it is"
        )
    if Momentum(theirs, group["nesterov"]) != momentum or group["dampening"] != 0:
        raise AttachError(
            f"the optimizer has {words(Momentum(theirs, group['nesterov']))} and dampening "
            f"{group['dampening']}, the strategy {words(momentum)} without dampening: give both the same, "
            f"such as dgc:momentum={theirs},nesterov={str(group['nesterov']).lower()}"
        )
