"""LAMB: layer-wise adaptive moments (You et al., ICLR 2020, arXiv 1904.00962, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tacit.optim.checking import checked_lr, fraction, not_negative
from tacit.optim.layerwise import LayerwiseOptimizer
from tacit.optim.sizes import add_, norm, unless_zero


class LAMB(LayerwiseOptimizer):
    """Adam, with steps scaled to the norm of the parameter.

    The paper's step t, for a parameter w with gradient g:

        m <- beta1 * m + (1 - beta1) * g            m' = m / (1 - beta1^t)
        v <- beta2 * v + (1 - beta2) * g^2          v' = v / (1 - beta2^t)
        r = m' / (sqrt(v') + eps) + weight_decay * w
        w <- w - lr * phi(|w|) / |r| * r            phi(z) = z

    Where |w| = 0 or |r| = 0, the ratio is 1. Parameters of fewer than two dimensions (biases, norms) neither
    decay nor have their step scaled, as in the authors' runs: for them it is Adam.

    Args:
        params: as for torch's optimizers.
        lr: the learning rate; scaled with the root of the batch, and warmed up.
        betas: each in [0, 1).
        eps: above 0.
        weight_decay: 0 or more.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        checked_lr(lr)
        for i, beta in enumerate(betas):
            fraction(f"betas[{i}]", beta)
        not_negative("eps", eps, zero=False)
        not_negative("weight_decay", weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._rooms: dict[torch.dtype, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rooms = {}

    def _update(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state |= {"step": torch.zeros((), dtype=torch.float32), "exp_avg": torch.zeros_like(p)}
            state["exp_avg_sq"] = torch.zeros_like(p)
        m, v, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        state["step"] += 1
        t = int(state["step"])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        r = self._room(p)
        torch.sqrt(v, out=r)
        r.div_((1 - beta2**t) ** 0.5).add_(group["eps"])
        torch.div(m, r, out=r)
        r.div_(1 - beta1**t)
        ratio: float | Tensor = 1.0
        if p.ndim > 1:
            if group["weight_decay"]:
                r.add_(p, alpha=group["weight_decay"])
            size, length = norm(p), norm(r)
            ratio = unless_zero(size / length, size, length)
        add_(p, r, -float(group["lr"]) * ratio)

    def _room(self, p: Tensor) -> Tensor:
        """Memory for one update; not part of the state, so not in checkpoints."""
        room = self._rooms.get(p.dtype)
        if room is None or room.numel() < p.numel() or room.device != p.device:
            room = self._rooms[p.dtype] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
        return room[: p.numel()].view_as(p)
