"""Real images: CIFAR-10, MNIST and scikit-learn's digits, with a network of one's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from tacit.errors import ConfigError, unknown
from tacit_lab.recipes import models
from tacit_lab.recipes.data import augment, cache, download
from tacit_lab.recipes.data import cifar10 as cifar10_files
from tacit_lab.recipes.data import mnist as mnist_files
from tacit_lab.recipes.data.splits import Images
from tacit_lab.recipes.digits import Digits, enlarged, file
from tacit_lab.recipes.hyperparameters import TUNINGS, triangle
from tacit_lab.recipes.models.precision import InBfloat16
from tacit_lab.recipes.recipe import Batch, Recipe, seeded, shard

CLASSES = 10
SIDE = 32
"""Pixels on each side of what a network gets; smaller images have a black frame."""
VALIDATION = 2000
"""Training images that learning rates are chosen by."""
EVALUATED = 250
"""Images at once."""
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What is known of a dataset before any file is read.

    Attributes:
        name: The recipe's, and that of its files in the cache.
        forms: The accepted forms of its files, in words.
        read: Reads it, raising `ConfigError`.
        mean: Of all training pixels in 0..1, for each channel.
        deviation: Likewise.
        augmented: Whether training images are cropped and mirrored.
        model: The network that is trained by default.
        epochs: How many suffice to reach the target.
        target: The held-out accuracy to reach, 0..1.
    """

    name: str
    forms: str
    read: Callable[[Path], Images]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augmented: bool
    model: str
    epochs: int
    target: float


CIFAR10 = Dataset(
    name="cifar10",
    forms="an image folder with train/CLASS/NAME.png and test/CLASS/NAME.png, an archive of one, or the "
    "official binary form, https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    read=cifar10_files.read,
    mean=(0.4914, 0.4822, 0.4465),
    deviation=(0.2470, 0.2435, 0.2616),
    augmented=True,
    model="resnet20",
    epochs=5,
    target=0.7,
)
MNIST = Dataset(
    name="mnist",
    forms="the folder with the four IDX files, train-images-idx3-ubyte.gz and so on, from "
    "http://yann.lecun.com/exdb/mnist",
    read=mnist_files.read,
    mean=(0.1307,),
    deviation=(0.3081,),
    augmented=False,
    model="lenet",
    epochs=2,
    target=0.98,
)
DIGITS = Dataset(
    name="digits",
    forms="scikit-learn's file",
    read=enlarged,
    mean=(0.3056,),
    deviation=(0.3237,),
    augmented=False,
    model="resnet8",
    epochs=12,
    target=0.95,
)


def cifar10(**choices: str | int | Path) -> ImageRecipe:
    """Ten classes of things and animals in colour; see `ImageRecipe`."""
    return ImageRecipe(CIFAR10, **choices)  # type: ignore[arg-type]  # those of Choices


def mnist(**choices: str | int | Path) -> ImageRecipe:
    """Handwritten digits; see `ImageRecipe`."""
    return ImageRecipe(MNIST, **choices)  # type: ignore[arg-type]  # those of Choices


def digits(model: str | None = None) -> Recipe:
    """Handwritten digits of scikit-learn: as they are for their own network, enlarged for any other."""
    return Digits() if model is None else ImageRecipe(DIGITS, model=model, data=file())


class ImageRecipe(Recipe):
    """Images of ten classes.

    The learning rate rises in the first part of a run and falls to nothing at its end. Convolutions are
    laid out channels-last, which is what CPUs are fastest at.

    Args:
        dataset: What is trained on.
        model: One of `models.known()`.
        data: Where the images are; None: where they were downloaded before.
        limit: Train on so many images, the first ones.
        precision: "fp32", or "bf16" to let the network multiply in bfloat16; its parameters and gradients
            are fp32 in both.

    Raises:
        ConfigError: There is no such network or precision, or `limit` is less than 1.
    """

    batch = 32

    def __init__(
        self,
        dataset: Dataset,
        *,
        model: str | None = None,
        data: Path | None = None,
        limit: int | None = None,
        precision: str = "fp32",
    ) -> None:
        self._dataset = dataset
        self._model = model or dataset.model
        if self._model not in models.known():
            raise unknown("model", self._model, models.known())
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        if limit is not None and limit < 1:
            raise ConfigError(f"--limit {limit} must be 1 or more, e.g. --limit 10000")
        self._path = data or download.fetched(dataset.name)
        self._limit, self._precision = limit, precision
        self._tuning = TUNINGS[self._model]
        self.name = self._described()
        self.epochs, self.target = dataset.epochs, dataset.target
        self._mean, self._deviation = (
            255 * torch.tensor(values).view(1, -1, 1, 1) for values in (dataset.mean, dataset.deviation)
        )

    def model(self, seed: int) -> nn.Module:
        """The chosen network."""
        channels = len(self._dataset.mean)
        network = seeded(lambda: models.build(self._model, channels=channels, classes=CLASSES), seed)
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stub
        return InBfloat16(network) if self._precision == "bf16" else network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum or AdamW, depending on the network."""
        return self._tuning.optimizer(model)

    def rate(self, done: float) -> float:
        """The factor on the learning rate: up in the first fifth of a run, then down to 0."""
        return triangle(done)

    def steps_per_epoch(self, world: int) -> int:
        """As many whole global batches as the images give."""
        return self._samples // (world * self.batch)

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Images of shape (batch, channels, 32, 32) and their classes."""
        images, targets = self._images.train
        noise = augment.noise(seed, epoch, rank)
        steps = self.steps_per_epoch(world)
        for chosen in shard(
            self._samples, self.batch, steps=steps, epoch=epoch, rank=rank, world=world, seed=seed
        ):
            batch = images[chosen]
            if self._dataset.augmented:
                batch = augment.crop_and_flip(batch, noise)
            yield self._ready(batch), targets[chosen]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        """Loss and accuracy on this rank's share of the test images, as they are."""
        return self._judged(model, *(tensor[rank::world] for tensor in self._images.test))

    @property
    def validation(self) -> int:
        """The first training images that `limit` leaves out; 0 where those are too few."""
        left = len(self._images.train.targets) - self._samples
        return VALIDATION if left >= VALIDATION else 0

    def validate(self, model: nn.Module) -> float | None:
        """Accuracy on those, without augmentation."""
        there = slice(self._samples, self._samples + self.validation)
        found = [tensor[there] for tensor in self._images.train]
        return self._judged(model, *found)[1] if self.validation else None

    def _judged(self, model: nn.Module, images: Tensor, targets: Tensor) -> tuple[float, float]:
        was_training = model.training
        model.eval()
        with torch.inference_mode():
            pieces = torch.split(images, EVALUATED)
            outputs = torch.cat([model(self._ready(piece)) for piece in pieces])
            right = (outputs.argmax(1) == targets).float().mean()
            loss = self.loss(outputs, targets)
        model.train(was_training)
        return float(loss), float(right)

    @cached_property
    def _images(self) -> Images:
        if self._path is None:
            name = self._dataset.name
            raise ConfigError(
                f"the recipe {name!r} trains on images that do not come with tacit: write --data PATH for "
                f"{self._dataset.forms}; or --download to fetch that ({download.megabytes(name):.0f} MB)"
            )
        images = cache.cached(self._dataset.name, self._path, self._dataset.read)
        if self._limit is not None and self._limit > len(images.train.targets):
            raise ConfigError(
                f"--limit {self._limit} is more than the {len(images.train.targets)} training images of "
                f"{self._path}: leave it out to use them all"
            )
        return images

    @property
    def _samples(self) -> int:
        everything = len(self._images.train.targets)
        return everything if self._limit is None else self._limit

    def _ready(self, images: Tensor) -> Tensor:
        """Pixels as networks take them: framed, normalized, channels-last."""
        frame = (SIDE - images.shape[3]) // 2
        if frame:
            images = pad(images, (frame, frame, frame, frame))
        ready = images.to(torch.float32, memory_format=torch.channels_last)
        return ready.sub_(self._mean).div_(self._deviation)

    def _described(self) -> str:
        """The recipe with all choices that decide its numbers, for titles."""
        parts = [self._model, self._path.name if self._path else "no data"]
        if self._limit is not None:
            parts.append(f"{self._limit} images")
        if self._precision != "fp32":
            parts.append(self._precision)
        return f"{self._dataset.name} ({', '.join(parts)})"
