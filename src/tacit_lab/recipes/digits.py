"""Handwritten digits: scikit-learn's 1,797 images of 8x8 pixels, and a network of 983,114 parameters.

Enlarged they are images as any others, for the networks of `tacit_lab.recipes.models`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from tacit.errors import ConfigError, installing
from tacit_lab.recipes.data.splits import Images, Split
from tacit_lab.recipes.recipe import Batch, Recipe, seeded, shard

HELD_OUT = 357
BLACKEST = 16
"""The largest value of a pixel."""


class Digits(Recipe):
    """Ten classes; most of the parameters sit in one matrix, as they did in VGG and AlexNet."""

    name = "digits"
    epochs = 4
    target = 0.95
    batch = 16

    def model(self, seed: int) -> nn.Module:
        """Three convolutions and two fully connected layers."""
        return seeded(_network, seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.015, momentum=0.9)

    def steps_per_epoch(self, world: int) -> int:
        """As many whole global batches as the images give; 22 on 4 ranks."""
        return len(_data().train_targets) // (world * self.batch)

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Images of shape (batch, 1, 8, 8) and their classes."""
        data = _data()
        steps = self.steps_per_epoch(world)
        for chosen in shard(
            len(data.train_targets), self.batch, steps=steps, epoch=epoch, rank=rank, world=world, seed=seed
        ):
            yield data.train_images[chosen], data.train_targets[chosen]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        """Loss and accuracy on 357 images that no rank trains on; every rank looks at all."""
        data = _data()
        with torch.inference_mode():
            outputs = model(data.test_images)
            right = (outputs.argmax(1) == data.test_targets).float().mean()
            return float(self.loss(outputs, data.test_targets)), float(right)


class _DigitsData(NamedTuple):
    train_images: Tensor
    train_targets: Tensor
    test_images: Tensor
    test_targets: Tensor


@cache
def _data() -> _DigitsData:
    images, targets = _shuffled(file())
    images = images.float()
    images = (images - images.mean()) / images.std()
    return _DigitsData(images[HELD_OUT:], targets[HELD_OUT:], images[:HELD_OUT], targets[:HELD_OUT])


def enlarged(path: Path) -> Images:
    """The same images with 32x32 pixels of 0..255, interpolated; the same ones are held out."""
    images, targets = _shuffled(path)
    large = interpolate(images * (255 / BLACKEST), scale_factor=4, mode="bilinear").round().byte()
    return Images(
        Split(large[HELD_OUT:], targets[HELD_OUT:].byte()), Split(large[:HELD_OUT], targets[:HELD_OUT].byte())
    )


def file() -> Path:
    """Scikit-learn's own. To import the package would take each rank of each run a second.

    Raises:
        ConfigError: It is not installed.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"the recipe 'digits' needs scikit-learn: {installing('recipes')}")
    return Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def _shuffled(path: Path) -> tuple[Tensor, Tensor]:
    """Pixels of 0..16, (n, 1, 8, 8), and classes, always in the same order: no seed makes the test harder."""
    table = torch.from_numpy(_table(path))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].view(-1, 1, 8, 8), table[:, -1]


def _table(path: Path) -> NDArray[np.int64]:
    """64 pixels and the class in each row."""
    return np.loadtxt(path, delimiter=",", dtype=np.int64)


def _network() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 896),
        nn.ReLU(),
        nn.Linear(896, 10),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # all of these layers have one
    return network
