"""A learning rate that follows what a batch gains (AdaScale: Johnson et al. 2020, arXiv 2007.05105)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from tacit.errors import AttachError, ConfigError
from tacit.model.torch_modes import shielded
from tacit.optim.checking import fraction
from tacit.torch_compat import at_end_of_backward
from tacit.transports.process_groups import sum_


class AdaScale:
    """Multiply the learning rate of each step by the gain of the batch over that of one rank.

    The paper's step t, for the gradients g_1 .. g_S of S equal parts of the batch, and their mean g:

        sigma^2 <- sum_i |g_i|^2 / (S - 1) - S |g|^2 / (S - 1)       both estimates are
        mu^2    <- |g|^2 - sigma^2 / S                                averaged over steps
        r       =  (sigma^2 + mu^2) / (sigma^2 / S + mu^2)            from 1 to S
        w       <- w - r lr(floor(tau)) g;  tau <- tau + r

    S is the number of ranks, times the backward passes of a step where their losses are divided by how many
    there are. So the rate and its schedule are those of one rank's batch, no warm-up is needed, and
    `progress` (tau) says how many steps of that small batch have been made: the training ends, and its
    schedule falls, by it. Make it after `attach`, or without; the gradient that is stepped by must be the
    mean of all ranks, so compress it by little (`bf16`, `int8`). Each step reads two numbers from the device.

    Difference from the paper: the averages begin at 0 and are corrected for it, as Adam's are.

    Args:
        model: wrapped in DDP.
        optimizer: SGD, with momentum or without.
        smoothing: of the averages, in [0, 1); None: 1 - S / 1000, as in the paper.

    Raises:
        AttachError: the model is not wrapped in DDP, or the optimizer is not SGD.
        ConfigError: a number is out of range.
    """

    def __init__(
        self, model: DistributedDataParallel, optimizer: Optimizer, *, smoothing: float | None = None
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise AttachError(
                "AdaScale compares each rank's gradient with the mean, and model is a "
                f"{type(model).__name__}: wrap it in DistributedDataParallel"
            )
        if not isinstance(optimizer, SGD):
            raise AttachError(
                f"AdaScale is for SGD, and optimizer is {type(optimizer).__name__}, whose steps do not grow "
                "with the gradient: scale its rate by scale_lr(optimizer, ratio, rule='sqrt')"
            )
        if smoothing is not None:
            fraction("smoothing", smoothing)
        self.gain = 1.0
        """What the learning rate of the last step was multiplied by, 1 to S."""
        self.progress = 0.0
        """How many steps of one rank's batch have been made."""
        self._group: Any = model.process_group
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._smoothing = smoothing
        self._squares: Tensor | None = None
        self._passes, self._in_backward = 0, False
        self._means, self._weight = [0.0, 0.0], 0.0
        self._rates: list[float] = []
        self._handles = [p.register_hook(self._seen) for p in self._params]  # type: ignore[no-untyped-call]
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: self._before(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._after(optimizer)),
        ]

    def _seen(self, grad: Tensor) -> None:
        """A parameter's gradient of this rank, before DDP averages it."""
        if not self._in_backward:
            self._in_backward = True
            at_end_of_backward(self._ended)
        square = grad.detach().float().square().sum()
        self._squares = square if self._squares is None else self._squares + square

    def _ended(self) -> None:
        self._in_backward = False
        self._passes += 1

    @shielded
    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        if self._squares is not None:
            self._measure()
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.gain
        self.progress += self.gain

    def _after(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def _measure(self) -> None:
        """Take this step's gradients into the averages, and the gain from these."""
        assert self._squares is not None
        ranks = self._group.size()
        parts, self._passes, passes = ranks * self._passes, 0, self._passes
        grads = [p.grad.float().square().sum() for p in self._params if p.grad is not None]
        mean = torch.stack(grads).sum() if grads else torch.zeros_like(self._squares)
        both = torch.stack([self._squares * passes**2, mean])
        self._squares = None
        if parts == 1:
            return
        if ranks > 1:
            sum_(both, self._group).wait()
        each, whole = both.tolist()
        each, whole = each / parts, whole / ranks
        noise = max(0.0, (each - whole) * parts / (parts - 1))
        found = noise, max(0.0, whole - noise / parts)
        if not all(map(math.isfinite, found)):
            return  # a step that overflows says nothing of the next
        keep = max(0.0, 1 - parts / 1000) if self._smoothing is None else self._smoothing
        self._means = [keep * old + (1 - keep) * new for old, new in zip(self._means, found, strict=True)]
        self._weight = keep * self._weight + 1 - keep
        sigma, mu = (value / self._weight for value in self._means)
        self.gain = (sigma + mu) / (sigma / parts + mu) if sigma + mu > 0 else 1.0

    @property
    def noise_scale(self) -> float:
        """sigma^2 / mu^2: the gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162), in parts.

        A batch of about so many parts is best. Infinite before the first step, and where all is noise.
        """
        sigma, mu = self._means
        return sigma / mu if mu > 0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """What a training that goes on needs; equal on all ranks."""
        return {"progress": self.progress, "means": [*self._means], "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError: it is no state of AdaScale's.
        """
        try:
            sigma, mu = map(float, state["means"])
            progress, weight = float(state["progress"]), float(state["weight"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is no state of AdaScale's ({error!r}): give what state_dict gave"
            ) from error
        self.progress, self._weight, self._means = progress, weight, [sigma, mu]

    def close(self) -> None:
        """Leave the optimizer and the model as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
