"""Calls before and after every step of any optimizer.

They are made before the optimizer's hooks, and after them. torch iterates over its hooks while it calls them,
so none may be added or removed then. So there are two for the whole process, and the functions that these
call may change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tacit.model.torch_modes import shielded

Call = Callable[[Optimizer], None]


class StepsHandle:
    """The registration of a function; `remove` ends it."""

    def __init__(self, call: Call, among: list[StepsHandle]) -> None:
        self.call, self._among = shielded(call), among
        among.append(self)

    def remove(self) -> None:
        """Remove the function; a second call does nothing."""
        if self in self._among:
            self._among.remove(self)


_BEFORE: list[StepsHandle] = []
_AFTER: list[StepsHandle] = []
_HOOKS: list[Any] = []


def before_steps(call: Call) -> StepsHandle:
    """Call a function with the optimizer, after those that were registered before."""
    _register()
    return StepsHandle(call, _BEFORE)


def after_steps(call: Call) -> StepsHandle:
    """Call a function with the optimizer, after those that were registered before."""
    _register()
    return StepsHandle(call, _AFTER)


def _register() -> None:
    if not _HOOKS:
        before = register_optimizer_step_pre_hook(partial(_call, _BEFORE))
        after = register_optimizer_step_post_hook(partial(_call, _AFTER))
        _HOOKS.extend((before, after))


def _call(handles: list[StepsHandle], optimizer: Optimizer, *_: object) -> None:
    for handle in tuple(handles):
        if handle in handles:
            handle.call(optimizer)
