"""Adam's variance, scaled to that of the mean gradient, for replicas that step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam, Optimizer

from tacit.contracts import AllReduce
from tacit.exchange.joined_requests import small_directly
from tacit.model.trained_model import local
from tacit.optimizer_hooks.taken_momentum import in_memory_order
from tacit.optimizer_hooks.variance_guard import Undo, VarianceGuard, gradient_of, variance_of, with_decay
from tacit.session import Session
from tacit.torch_compat import add_squares_of_each_, divide_each_, multiply_each_
from tacit.transports.process_groups import gathered

SAMPLED = 256
"""The approximate number of entries of a parameter's gradient that are compared with those of the peers."""
OFTEN, PERIOD = 10, 8
"""They are compared after each of the first 10 steps, and after every 8th from there on."""


@dataclass(slots=True)
class Squares:
    """Running means of squared gradients of a parameter, with Adam's decay, summed over a sample of entries.

    Attributes:
        own: the squares of the replicas' gradients, averaged over the replicas.
        common: the squares of the mean gradient.
        step: the step of the last sample.
    """

    own: float = 0.0
    common: float = 0.0
    step: int = -1

    def share(self, replicas: int) -> float:
        """The ratio of the mean gradient's squares to the replicas': from 1 / replicas, for noise, to 1."""
        return min(1.0, max(1 / replicas, self.common / self.own)) if self.own > 0 else 1.0

    def move(self, own: float, common: float, step: int, beta: float) -> None:
        """Add a sample to the running means; `beta`: Adam's `betas[1]`."""
        kept = beta ** (step - self.step)
        self.own += (1 - kept) * (own - self.own)
        self.common += (1 - kept) * (common - self.common)
        self.step = step


class ScaledVariance(VarianceGuard):
    """Makes Adam, on each replica, divide by the root of the mean gradient's variance.

    With P replicas, a replica's batch is P times smaller, so the squares of its gradient are larger than
    those of the mean gradient: P times, if all is noise. As Adam divides by their root, replicas would move
    too little, each parameter by another factor, which changes during training. So replicas compare a sample
    of each parameter's gradient now and then, and a step's variance is multiplied by r, the ratio of the mean
    gradient's squares to the replicas'. Between steps Adam's state has its usual variance. r measures the
    gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162) of each parameter; scaling Adam by it is
    ours.

    Args:
        session: has the replicas.
        optimizers: step the parameters; all but Adam and AdamW are left alone.
        named: the parameters.
        near: the ranks with the other shards of this replica.
    """

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Tensor],
        near: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__([each for each in optimizers if isinstance(each, Adam)], named)
        self._session, self._named = session, named
        self._replicas, self._near = len(session.ranks), near
        self.squares = {
            name: Squares()
            for optimizer in self._optimizers
            for group, _, name in self._parameters(optimizer)
            if can_scale(group)
        }
        self._samples: dict[str, Tensor] = {}
        self._seen: set[str] = set()
        self._of_mean: set[str] = set()
        """The parameters whose variance was of mean gradients before these replicas stepped; until r is
        known.
        """
        if self._replicas > 1 and self.squares:
            self._guard()

    # ---- around a step --------------------------------------------------------------------------------

    def _change(self, optimizer: Optimizer) -> Undo | None:
        """Sample the gradients, and set the variance so that Adam's step makes it the scaled one."""
        step = self._session.step
        samples = self.due(step) or self.due(step - 1)  # with a scaler an attempt ends with its backward
        variances, gradients, shares, factors = [], [], [], []
        for group, p, name in self._parameters(optimizer):
            if p.grad is None or p.grad.is_sparse or name not in self.squares:
                continue
            g = gradient_of(p, optimizer)
            if samples:
                self._samples[name] = sampled(g).to(torch.float32, copy=True)
            variance = variance_of(p, optimizer)
            if name not in self._seen and variance is not None:
                self._of_mean.add(name)
            self._seen.add(name)
            if variance is None:
                continue
            # Below that, rounding could make it negative.
            share = max(self.squares[name].share(self._replicas), 4 * torch.finfo(variance.dtype).eps)
            if share == 1.0:
                continue
            beta = float(group["betas"][1])
            variances.append(variance)
            gradients.append(with_decay(g, p, group))
            shares.append(share)
            factors.append((share - 1) * (1 - beta) / beta)
        if not shares:
            return None
        # Adam turns x into beta x + (1 - beta) g^2, which is to be r times its own result.
        multiply_each_(variances, shares)
        add_squares_of_each_(variances, gradients, factors)
        return lambda stepped: divide_each_(variances, shares)

    # ---- exchanges ----------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether gradients are compared after this step, counted from 0."""
        return bool(self._handles) and (step < OFTEN or (step + 1) % PERIOD == 0)

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Compare the samples. A collective call."""
        samples, self._samples = self._samples, {}
        device = self._session.buckets[0].device
        parts = [
            (samples[name] if name in samples else self._nothing(name)).to(device) for name in self.squares
        ]
        counts = torch.tensor(
            [float(name in samples) for name in self.squares], device=device, dtype=torch.float32
        )
        own = torch.stack([each.square().sum() for each in parts])
        flat = torch.cat([*parts, own, counts])
        request = AllReduce((flat,), self._session.strategy.topology.scope)
        self._session.ask(lambda: small_directly(request, self._replicas, math.inf), "variances", of=flat)
        *means, owns, counts = torch.split(flat, [each.numel() for each in (*parts, own, counts)])
        common = torch.stack([each.square().sum() for each in means])
        sums = torch.stack([owns, common, counts]).cpu()
        if self._near is not None:
            shards = torch.stack(gathered(sums, self._near))
            sums[:2] = shards[:, :2].sum(0)
        if not bool(sums.isfinite().all()):
            return  # the round of the parameters reports which rank has NaN
        betas = {
            name: float(group["betas"][1])
            for optimizer in self._optimizers
            for group, _, name in self._parameters(optimizer)
        }
        for name, (square, mean, count) in zip(self.squares, sums.t().tolist(), strict=True):
            if count > 0:
                self.squares[name].move(square / count, mean / count**2, step, betas[name])
        self._adopt()

    def _nothing(self, name: str) -> Tensor:
        """Zeros in place of a sample, if this replica has taken no step."""
        return torch.zeros_like(sampled(local(self._named[name].detach())), dtype=torch.float32)

    def _adopt(self) -> None:
        """Scale variances that were of mean gradients to the size of the replicas'."""
        known = {name for name in self._of_mean if self.squares[name].step >= 0}
        for each in self._optimizers:
            self._multiply(each, known, lambda share: 1 / share)
        self._of_mean -= known

    def _release(self, optimizer: Optimizer) -> None:
        """Give Adam the variance of the mean gradient."""
        self._multiply(optimizer, self.squares.keys() - self._of_mean, lambda share: share)

    def _multiply(
        self, optimizer: Optimizer, names: AbstractSet[str], factor: Callable[[float], float]
    ) -> None:
        for _, p, name in self._parameters(optimizer):
            variance = variance_of(p, optimizer)
            if name in names and variance is not None:
                variance.mul_(factor(self.squares[name].share(self._replicas)))

    # ---- checkpoints ------------------------------------------------------------------------------

    def saved_state(self) -> dict[str, Any]:
        """The state for a checkpoint: plain values, equal on all ranks."""
        found = {name: (each.own, each.common, each.step) for name, each in self.squares.items()}
        return {"replicas": self._replicas, "squares": found}

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Go on from a state of `saved_state`, with optimizers whose variances are the replicas'."""
        for name, (own, common, step) in kept.get("squares", {}).items():
            if name in self.squares and step >= 0:
                mean = of_others(own, common, kept["replicas"], self._replicas)
                self.squares[name] = Squares(own, mean, step)
                self._seen.add(name)
                self._of_mean.discard(name)


def of_others(own: float, common: float, before: int, replicas: int) -> float:
    """The ratio of the squares of a mean of `replicas` gradients to those of a mean of `before`."""
    noise = (own - common) / (1 - 1 / before) if before > 1 else 0.0
    return max(0.0, own - noise * (1 - 1 / replicas))


def can_scale(group: Mapping[str, Any]) -> bool:
    """Whether hooks in Python can change the steps of this group of Adam."""
    return not (group["capturable"] or group["differentiable"])


def sampled(x: Tensor) -> Tensor:
    """About `SAMPLED` entries at equal distances, in the order of memory: the same on all ranks."""
    flat = in_memory_order(x, x)
    return flat[:: max(1, flat.numel() // SAMPLED)]
