"""What optimizers have in common that adapt the rate layer by layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class LayerwiseOptimizer(Optimizer):
    """An optimizer that updates each parameter that has a gradient by `_update`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. `closure`, where given, computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    @abstractmethod
    def _update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Update the parameter `p` in place by its gradient."""
