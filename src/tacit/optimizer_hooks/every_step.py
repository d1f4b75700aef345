"""What is called before and behind every step of any optimizer.

That is before its own hooks, and behind them. torch goes over its hooks while it calls them, and must not be
given or lose one then. So it has two for the whole process, and who is called by them may come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tacit.model.torch_modes import shielded

__all__ = ["StepsHandle", "before_steps", "behind_steps"]

Call = Callable[[Optimizer], None]


class StepsHandle:
    """What is called; `remove` ends it."""

    def __init__(self, call: Call, among: list[StepsHandle]) -> None:
        self.call, self._among = shielded(call), among
        among.append(self)

    def remove(self) -> None:
        """Call it no more; again does nothing."""
        if self in self._among:
            self._among.remove(self)


_BEFORE: list[StepsHandle] = []
_BEHIND: list[StepsHandle] = []
_HOOKS: list[Any] = []


def before_steps(call: Call) -> StepsHandle:
    """Have it called with the optimizer, behind those that were given before."""
    _register()
    return StepsHandle(call, _BEFORE)


def behind_steps(call: Call) -> StepsHandle:
    """Have it called with the optimizer, behind those that were given before."""
    _register()
    return StepsHandle(call, _BEHIND)


def _register() -> None:
    if not _HOOKS:
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: _call(_BEFORE, optimizer))
        behind = register_optimizer_step_post_hook(lambda optimizer, *_: _call(_BEHIND, optimizer))
        _HOOKS.extend((before, behind))


def _call(handles: list[StepsHandle], optimizer: Optimizer) -> None:
    for handle in tuple(handles):
        if handle in handles:
            handle.call(optimizer)
