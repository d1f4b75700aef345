"""Made-up images, for trainings that need no data: ten smooth prototypes, and noise as rough as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from tacit.errors import unknown
from tacit_lab.recipes import models
from tacit_lab.recipes.hyperparameters import TUNINGS, triangle
from tacit_lab.recipes.recipe import Batch, Recipe, seeded, shard

CLASSES = 10
SIDE = 32
TRAIN, HELD_OUT = 4096, 512
BLUR = 1.6
"""How large the smooth noise is; prototypes have 1. With it classes overlap: the loss stays above 0."""


class MadeUp(Recipe):
    """A network for images on grey images that nobody has taken.

    Each is the prototype of its class, smooth noise of the same fineness, and noise of single pixels.

    Args:
        model: one of `models.known()`.
        steady: keep the learning rate as it is; else it goes as for real images, up in the first fifth of a
            run, then down to nothing.

    Raises:
        ConfigError: there is no such network.
    """

    epochs = 2
    target = 0.7
    batch = 16

    def __init__(self, model: str = "lenet", *, steady: bool = False) -> None:
        if model not in models.known():
            raise unknown("model", model, models.known())
        self._model, self._steady = model, steady
        self._tuning = TUNINGS[model]
        self.name = f"made-up ({model})"

    def model(self, seed: int) -> nn.Module:
        """The chosen network, for one channel."""
        return seeded(lambda: models.build(self._model, channels=1, classes=CLASSES), seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """What suits the network."""
        return self._tuning.optimizer(model)

    def rate(self, done: float) -> float:
        """Up, then down to nothing, or steady."""
        return 1.0 if self._steady else triangle(done)

    def steps_per_epoch(self, world: int) -> int:
        """As many whole global batches as the images give."""
        return TRAIN // (world * self.batch)

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Images of shape (batch, 1, 32, 32) and their classes."""
        images, targets = _images()[0]
        steps = self.steps_per_epoch(world)
        for chosen in shard(TRAIN, self.batch, steps=steps, epoch=epoch, rank=rank, world=world, seed=seed):
            yield images[chosen], targets[chosen]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        """Loss and accuracy on 512 other images."""
        images, targets = _images()[1]
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            outputs = model(images)
        model.train(was_training)
        right = (outputs.argmax(1) == targets).float().mean()
        return float(self.loss(outputs, targets)), float(right)


@cache
def _images() -> tuple[Batch, Batch]:
    """The same for every seed: that decides weights and order only."""
    generator = torch.Generator().manual_seed(0)
    count = TRAIN + HELD_OUT
    prototypes = _smooth(CLASSES, generator)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    images = prototypes[targets] + BLUR * _smooth(count, generator)
    images += torch.randn(images.shape, generator=generator)
    images /= images.std()
    return (images[:TRAIN], targets[:TRAIN]), (images[TRAIN:], targets[TRAIN:])


def _smooth(count: int, generator: torch.Generator) -> Tensor:
    coarse = torch.randn(count, 1, 4, 4, generator=generator)
    return interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
