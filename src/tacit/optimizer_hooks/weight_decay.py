"""Momentum of the weight decay, for a compressor that has taken the gradient's momentum from SGD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.contracts import Momentum, state_dtype
from tacit.optimizer_hooks.variance_guard import skips

Group = dict[str, Any]


class DecayMomentum:
    """Applies to weight decay the momentum that SGD would have applied.

    SGD adds decay to the gradient, and both go through its momentum. A compressor that applies momentum sees
    the gradient alone. So the decay has a separate velocity here, as in the authors' optimizer for DGC: d <-
    m d + decay * x. SGD, which now has no momentum, adds decay * x itself; this adds the rest, m times the
    velocity, to the gradient before the step. Parameters are equal on all ranks, and so is d: nothing is
    sent.

    Args:
        momentum: the compressor's.
        named: the parameters.
    """

    def __init__(self, momentum: Momentum, named: Mapping[str, Tensor]) -> None:
        self._momentum = momentum
        self._names = {id(p): name for name, p in named.items()}
        self._named = named
        self._velocities: dict[str, Tensor] = {}

    def prepare(self, groups: Iterable[Group]) -> None:
        """Allocate a velocity for every parameter that decays."""
        for group in groups:
            for p in group["params"]:
                if group["weight_decay"] and id(p) in self._names:
                    self._velocity(p)

    def expect(self, names: AbstractSet[str]) -> None:
        """Allocate one for each of these: a checkpoint has theirs, which shrink where nothing decays now."""
        for name in self._named.keys() & names:
            self._velocity(self._named[name])

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, groups: Iterable[Group]) -> None:
        """Add the decay's momentum to the gradients; nothing, if the step will be skipped."""
        if skips(optimizer):
            return
        scale = getattr(optimizer, "grad_scale", None)
        for group in groups:
            sign = -1.0 if group["maximize"] else 1.0
            weight = sign * (1.0 if scale is None else float(scale))
            for p in group["params"]:
                if p.grad is not None and id(p) in self._names:
                    self._add(p, p.grad, group["weight_decay"], weight)

    def saved_state(self) -> dict[str, Tensor]:
        """The velocities for a checkpoint, by parameter and in its shape; equal on all ranks."""
        return dict(self._velocities)

    def _add(self, p: Tensor, grad: Tensor, decay: float, weight: float) -> None:
        if not decay and self._names[id(p)] not in self._velocities:
            return
        m, velocity = self._momentum.factor, self._velocity(p)
        if self._momentum.nesterov:
            velocity.mul_(m).add_(p, alpha=decay)
            grad.add_(velocity, alpha=weight * m)
        else:
            grad.add_(velocity, alpha=weight * m)
            velocity.mul_(m).add_(p, alpha=decay)

    def _velocity(self, p: Tensor) -> Tensor:
        name = self._names[id(p)]
        if name not in self._velocities:
            # In the parameter's layout, as operations on mixed layouts take more than twice as long.
            self._velocities[name] = torch.zeros_like(p, dtype=state_dtype(p.dtype), requires_grad=False)
        return self._velocities[name]
