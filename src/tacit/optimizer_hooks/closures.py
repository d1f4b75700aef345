"""Hooks for steps with a closure that computes the gradients, as those of Lightning and of LBFGS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.model.torch_modes import shielded

StepPreHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments of a step; None: there is none, and the gradients are there."""
    return kwargs.get("closure") or (args[1] if len(args) > 1 else None)


def with_gradients(act: Callable[[Optimizer], object]) -> StepPreHook:
    """A hook for `register_step_pre_hook` that calls `act` when the step's gradients are there.

    That is before the step, or if it has a closure, after each call of the closure. The step raises errors of
    `act`, and takes no gradient.
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
    after: Callable[..., None],
) -> list[RemovableHandle]:
    """Call `before` when a step's gradients are there (`with_gradients`), and `after` after the step."""
    return [
        handle
        for each in optimizers
        for handle in (
            each.register_step_pre_hook(with_gradients(before)),
            each.register_step_post_hook(shielded(after)),
        )
    ]
