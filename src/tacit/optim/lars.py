"""LARS: layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, arXiv 1708.03888, algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tacit.optim.checking import checked_lr, fraction, not_negative
from tacit.optim.layerwise import LayerwiseOptimizer
from tacit.optim.sizes import add_, norm, unless_zero


class LARS(LayerwiseOptimizer):
    """SGD with momentum, with a learning rate for each parameter.

    The paper's step, for a parameter w with gradient g:

        r = trust * |w| / (|g| + weight_decay * |w|)
        v <- momentum * v + lr * r * (g + weight_decay * w)
        w <- w - v

    As in the paper lr is inside v, where torch's SGD multiplies the whole of v: they differ when it changes.
    Parameters of fewer than two dimensions (biases, norms) take r = 1 and no decay, as is usual: their norms
    are not informative. So does a parameter with |w| = 0 or |g| = 0, in this step.

    Args:
        params: as for torch's optimizers.
        lr: the global learning rate, the paper's gamma; scaled with the batch, and warmed up.
        momentum: in [0, 1).
        weight_decay: the paper's beta; 0 or more.
        trust: the trust coefficient, the paper's eta; above 0.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        trust: float = 0.001,
    ) -> None:
        checked_lr(lr)
        fraction("momentum", momentum)
        not_negative("weight_decay", weight_decay)
        not_negative("trust", trust, zero=False)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def _update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        rate: float | Tensor = float(group["lr"])
        decay = 0.0
        if p.ndim > 1:
            decay = group["weight_decay"]
            size, slope = norm(p), norm(g)
            rate = rate * unless_zero(group["trust"] * size / (slope + decay * size), size, slope)
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        v: Tensor = state["momentum_buffer"]
        add_(v.mul_(group["momentum"]), g, rate)
        if decay:
            add_(v, p, rate * decay)
        p.sub_(v)
