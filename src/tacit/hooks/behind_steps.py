"""What is called behind every step of any optimizer, when the optimizer's own hooks have been called.

torch goes over its hooks while it calls them, and must not be given or lose one then. So it has one hook for
the whole process, and who is called by that may come and go at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["StepsHandle", "behind_steps"]

Call = Callable[[Optimizer], None]


class StepsHandle:
    """What is called; `remove` ends it."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def remove(self) -> None:
        """Call it no more; again does nothing."""
        if self in _HANDLES:
            _HANDLES.remove(self)


_HANDLES: list[StepsHandle] = []
_HOOK: list[Any] = []


def behind_steps(call: Call) -> StepsHandle:
    """Have it called with the optimizer, behind those that were given before."""
    if not _HOOK:
        _HOOK.append(register_optimizer_step_post_hook(_stepped))
    handle = StepsHandle(call)
    _HANDLES.append(handle)
    return handle


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for handle in tuple(_HANDLES):
        if handle in _HANDLES:
            handle.call(optimizer)
