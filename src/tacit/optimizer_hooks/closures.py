"""Steps that are given a closure compute their gradients in there, as those of Lightning and of LBFGS do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.model.torch_modes import shielded

StepPreHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that a step is given, by what its hook is given; None: the gradients are there."""
    return kwargs.get("closure") or (args[1] if len(args) > 1 else None)


def with_gradients(act: Callable[[Optimizer], object]) -> StepPreHook:
    """A hook for `register_step_pre_hook` that calls `act` when the step's gradients are there.

    That is before the step, or where it is given a closure, behind each call of that. What `act` raises, the
    step raises, and takes no gradient.
    """

    act = shielded(act)

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = closure_of(args, kwargs)
        if closure is None:
            act(optimizer)
            return None

        def computed() -> Any:
            loss = closure()
            act(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    return before


def around_steps(
    optimizers: Iterable[Optimizer],
    before: Callable[[Optimizer], object],
    behind: Callable[..., None],
) -> list[RemovableHandle]:
    """Have `before` called when a step's gradients are there (`with_gradients`), and `behind` behind it."""
    return [
        handle
        for each in optimizers
        for handle in (
            each.register_step_pre_hook(with_gradients(before)),
            each.register_step_post_hook(shielded(behind)),
        )
    ]
