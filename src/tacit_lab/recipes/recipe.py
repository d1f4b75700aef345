"""What a recipe is: a model, its data and how it learns, the same for every algorithm that trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from tacit.strategy import AnyStrategy

OWN_MOMENTUM = ("demo", "dion")
"""Algorithms that are for SGD without momentum, as they keep it themselves."""
Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets; the first dim of both counts the samples."""


class Recipe(ABC):
    """A task small enough to compare algorithms on.

    The seed decides the initial weights; the seed, the epoch, the rank and the number of ranks decide the
    order of the data. An algorithm can change neither.
    """

    name: str
    """The name in records."""
    epochs: int
    """How many epochs suffice to reach the target with synchronous training."""
    target: float
    """The held-out accuracy to reach, 0..1."""
    batch: int
    """Samples a step on each rank."""

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Make what trainings need and what is kept for all of them; `tell` is given a line now and then."""
        return

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A fresh model, with equal weights for equal seeds."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that trains this recipe's model."""

    @abstractmethod
    def steps_per_epoch(self, world: int) -> int:
        """How many steps an epoch has on `world` ranks; 0 if there is too little data for so many."""

    @abstractmethod
    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """This rank's batches of an epoch; no two ranks see the same sample in one epoch."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar to call backward on."""

    @abstractmethod
    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        """Loss and accuracy (0..1) on this rank's share of the held-out data; all of it if it is small."""

    @property
    def validation(self) -> int:
        """Samples of neither training nor `evaluate`, by which `validate` judges; 0 where there are none."""
        return 0

    def validate(self, model: nn.Module) -> float | None:
        """Accuracy (0..1) on the samples of `validation`; None where there are none."""
        return None

    def rate(self, done: float) -> float:
        """The factor on the optimizer's learning rate after the share `done` (0..1) of the run."""
        return 1.0


def optimizer_of(
    recipe: Recipe, model: nn.Module, strategy: AnyStrategy | None, rate: float
) -> torch.optim.Optimizer:
    """The recipe's optimizer, at `rate` times its learning rate.

    For an algorithm that keeps momentum itself it is SGD without, of the recipe's rates and weight decay.
    """
    found = recipe.optimizer(model)
    if strategy is not None and strategy.name.partition(":")[0] in OWN_MOMENTUM:
        kept = ("params", "lr", "weight_decay")
        groups = [{key: group[key] for key in kept} for group in found.param_groups]
        found = torch.optim.SGD(groups, lr=0.0)  # each group has its own
    for group in found.param_groups:
        group["lr"] *= rate
    return found


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model with random numbers that depend on the seed alone, and leave torch's own as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def shard(samples: int, batch: int, *, steps: int, epoch: int, rank: int, world: int, seed: int) -> Tensor:
    """One rank's share of a shuffled epoch.

    Returns:
        Indices below `samples` of shape (steps, batch); the ranks' shares are disjoint.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(samples, generator=generator)
    return order[: steps * world * batch].view(steps, world, batch)[:, rank]
