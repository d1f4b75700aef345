"""A server's optimizers: the arithmetic of torch's SGD, Adam and AdamW, and an outer one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import State
from tacit.errors import ConfigError
from tacit.stores.messages import OptimizerSpec


class ServerOptimizer(ABC):
    """How a gradient moves a bucket's parameters, element by element."""

    @abstractmethod
    def init(self, like: Tensor) -> State:
        """The state before the first step."""

    @abstractmethod
    def apply_(self, x: Tensor, g: Tensor, state: State, lr: float) -> None:
        """Step `x` in place; `g` and `state` are overwritten."""


@dataclass(frozen=True)
class ServerSGD(ServerOptimizer):
    """As `torch.optim.SGD`."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name in ("momentum", "dampening", "weight_decay"):
            checks.real(name, getattr(self, name), "write a number that torch's SGD takes")
        checks.flag("nesterov", self.nesterov)

    def init(self, like: Tensor) -> State:
        """The velocity, and whether there was a step, where there is momentum."""
        return (
            {"velocity": torch.zeros_like(like), "steps": torch.zeros((), dtype=torch.float32)}
            if self.momentum
            else {}
        )

    def apply_(self, x: Tensor, g: Tensor, state: State, lr: float) -> None:
        """v = m v + g; x -= lr v. The first v is g, without dampening."""
        if self.weight_decay:
            g.add_(x, alpha=self.weight_decay)
        if self.momentum:
            first = not bool(state["steps"])
            v = state["velocity"].mul_(self.momentum).add_(g, alpha=1.0 if first else 1 - self.dampening)
            state["steps"].add_(1)
            g = g.add_(v, alpha=self.momentum) if self.nesterov else v
        x.add_(g, alpha=-lr)


@dataclass(frozen=True)
class ServerAdam(ServerOptimizer):
    """As `torch.optim.Adam`; with `decoupled` as `AdamW`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.betas, tuple) and len(self.betas) == 2):
            raise ConfigError(f"betas={self.betas!r} are not two numbers: write those of torch's Adam")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1])):
            checks.real(name, value, "write numbers that torch's Adam takes", least=0, below=1)
        for name in ("eps", "weight_decay"):
            checks.real(name, getattr(self, name), "write a number that torch's Adam takes")

    def init(self, like: Tensor) -> State:
        """Both moments, zero, and the number of steps."""
        return {
            "mean": torch.zeros_like(like),
            "square": torch.zeros_like(like),
            "steps": torch.zeros((), dtype=torch.float64),
        }

    def apply_(self, x: Tensor, g: Tensor, state: State, lr: float) -> None:
        """Bias-corrected moments: x -= lr m' / (sqrt(v') + eps)."""
        if self.decoupled:
            x.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            g.add_(x, alpha=self.weight_decay)
        steps = float(state["steps"].add_(1))
        mean = state["mean"].lerp_(g, 1 - self.betas[0])
        square = state["square"].mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
        size = lr / (1 - self.betas[0] ** steps)
        scale = torch.sqrt(square, out=g).div_(math.sqrt(1 - self.betas[1] ** steps)).add_(self.eps)
        x.addcdiv_(mean, scale, value=-size)


@dataclass(frozen=True)
class ServerDelayedNesterov(ServerOptimizer):
    """As `topologies.DelayedNesterov`, by what workers have moved.

    For a push d, of N = `delay`:

        s <- s + d / N;                           m <- beta m + s, s <- 0 after each Nth push
        x <- x + lr d / N                         x <- x + lr (d / N + beta m) then

    Attributes:
        lr, momentum, delay: see there.
        share: what d / N is of what `apply_` gets, which is d over the number of workers.
    """

    lr: float
    momentum: float
    delay: int
    share: float

    def init(self, like: Tensor) -> State:
        """The momentum and what has come since its last step, zero, and the number of pushes."""
        return {
            "velocity": torch.zeros_like(like),
            "since": torch.zeros_like(like),
            "steps": torch.zeros((), dtype=torch.float64),
        }

    def apply_(self, x: Tensor, g: Tensor, state: State, lr: float) -> None:
        """See the class; `lr` is the worker's."""
        since = state["since"].add_(g.mul_(self.share))
        if float(state["steps"].add_(1)) % self.delay == 0:
            g.add_(state["velocity"].mul_(self.momentum).add_(since), alpha=self.momentum)
            since.zero_()
        x.add_(g, alpha=self.lr)


def optimizer_from(spec: OptimizerSpec) -> ServerOptimizer:
    """The optimizer that a worker has described: the name of torch's, and its hyper-parameters.

    Raises:
        ConfigError: it is none of these.
    """
    values: dict[str, Any] = dict(spec)
    kind = values.pop("kind", None)
    try:
        if kind == "SGD":
            return ServerSGD(**values)
        if kind in ("Adam", "AdamW"):
            betas = tuple(values.pop("betas", (0.9, 0.999)))
            return ServerAdam(betas=betas, **values, decoupled=kind == "AdamW")
    except TypeError as error:
        raise ConfigError(f"a server has no {kind} of {spec!r:.300}: {error}") from error
    raise ConfigError(f"a server has no {kind!r:.60}: use SGD, Adam or AdamW, or optimizer='worker'")
