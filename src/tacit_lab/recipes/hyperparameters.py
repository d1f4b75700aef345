"""How each network for images is trained; found by short runs on CIFAR-10, see docs/recipes.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

PEAK = 0.2
"""The part of a run in which the learning rate rises."""


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum 0.9."""

    lr: float
    weight_decay: float = 5e-4

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all the model's parameters."""
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Adam:
    """AdamW."""

    lr: float
    weight_decay: float = 0.05

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all the model's parameters."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)


TUNINGS: dict[str, Sgd | Adam] = {
    "alexnet": Sgd(0.02),
    "lenet": Sgd(0.05),
    "resnet8": Sgd(0.1),
    "resnet20": Sgd(0.1),
    "vgg11": Sgd(0.02),
    "vgg11-narrow": Sgd(0.05),
    "vit": Adam(1e-3),
}
"""For 32 images a rank on four ranks; a rate is the highest of a run."""


def triangle(done: float) -> float:
    """The learning rate's factor, 0..1: up to 1 in the first fifth of a run, then down to nothing.

    Args:
        done: How much of the run is over, 0..1.
    """
    return done / PEAK if done < PEAK else (1 - done) / (1 - PEAK)
