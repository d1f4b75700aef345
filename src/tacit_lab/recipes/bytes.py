"""Predict the next byte of Python's standard library, by a transformer, small or large."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tacit.errors import ConfigError
from tacit_lab.recipes.hyperparameters import triangle
from tacit_lab.recipes.models.gpt import GPT
from tacit_lab.recipes.recipe import Batch, Recipe, seeded, shard

LENGTH = 128
"""Bytes in a sample."""
TRAIN_BYTES = 2_000_000
HELD_OUT_BYTES = VALIDATION_BYTES = 12_288
EVALUATED = 128
"""Windows at once."""
HELD_OUT_EVERY = 10
"""Of the source files, sorted by name, every tenth is held out."""


class TextWindows(NamedTuple):
    """Text in windows of LENGTH + 1 bytes: uint8 of shape (n, 129)."""

    train: Tensor
    held_out: Tensor
    validation: Tensor


class Bytes(Recipe):
    """A language model: every parameter is used at every step, by Adam, whose state makes it sensitive."""

    name = "bytes"
    epochs = 2
    target = 0.4
    batch = 8
    steps = 120
    """Steps in an epoch, so that one is a reasonable wait at 100 Mbit/s; the source would give more."""

    def __init__(self, held_out: int = HELD_OUT_BYTES) -> None:
        """Judge by about so many bytes."""
        self._held_out = held_out

    def data(self) -> TextWindows:
        """The text, the same for all seeds."""
        return _data(self._held_out)

    def model(self, seed: int) -> nn.Module:
        """Three blocks of width 128 over a context of 128 bytes."""
        return seeded(lambda: GPT(vocabulary=256, length=LENGTH, width=128, heads=4, blocks=3), seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for all parameters."""
        return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def steps_per_epoch(self, world: int) -> int:
        """At most `steps`; fewer if there is too little text for so many ranks."""
        return min(self.steps, len(self.data().train) // (world * self.batch))

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Windows of shape (batch, 128), and the same windows one byte later."""
        windows = self.data().train
        steps = self.steps_per_epoch(world)
        for chosen in shard(
            len(windows), self.batch, steps=steps, epoch=epoch, rank=rank, world=world, seed=seed
        ):
            batch = windows[chosen].long()
            yield batch[:, :-1], batch[:, 1:]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats a byte."""
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        """Loss (nats a byte) and the share of next bytes guessed right, in held-out files, on every rank."""
        return self._judged(model, self.data().held_out)

    @property
    def validation(self) -> int:
        """Bytes by which learning rates are chosen; `bytes` has none, and goes by its loss in training."""
        return self.data().validation[:, 1:].numel()

    def validate(self, model: nn.Module) -> float | None:
        """The share of next bytes guessed right in text of neither; None where there is none."""
        return self._judged(model, self.data().validation)[1] if self.validation else None

    def _judged(self, model: nn.Module, windows: Tensor) -> tuple[float, float]:
        windows, loss, right = windows.long(), 0.0, 0
        with torch.inference_mode():
            for some in torch.split(windows, EVALUATED):
                outputs = model(some[:, :-1])
                right += int((outputs.argmax(2) == some[:, 1:]).sum())
                loss += float(self.loss(outputs, some[:, 1:])) * len(some)
        return loss / len(windows), right / windows[:, 1:].numel()


class Gpt(Bytes):
    """The same by a network of usual shape, for which 80 steps are few.

    The learning rate rises in the first part of a run and falls to nothing at its end.
    """

    name = "gpt"
    target = 0.35
    batch = 4
    steps = 40
    train_bytes = TRAIN_BYTES

    def data(self) -> TextWindows:
        """The text; learning rates are chosen by some behind what is trained on."""
        return _data(self._held_out, VALIDATION_BYTES, self.train_bytes)

    def model(self, seed: int) -> nn.Module:
        """Six blocks of width 384: 10,795,008 parameters."""
        return seeded(lambda: GPT(vocabulary=256, length=LENGTH, width=384, heads=6, blocks=6), seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for all parameters."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def rate(self, done: float) -> float:
        """The factor on the learning rate: up in the first fifth of a run, then down to 0."""
        return triangle(done)


@cache
def _data(
    held_out_bytes: int = HELD_OUT_BYTES, validation_bytes: int = 0, train_bytes: int = TRAIN_BYTES
) -> TextWindows:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    if len(files) <= HELD_OUT_EVERY:
        raise ConfigError(f"the recipe 'bytes' reads Python's own source, and {library} holds almost none")
    held_out = files[::HELD_OUT_EVERY]
    train = [path for path in files if path not in held_out]
    texts = [b"".join(path.read_bytes() for path in paths) for paths in (train, held_out)]
    return TextWindows(
        windows(texts[0], train_bytes),
        windows(texts[1], held_out_bytes, spread=True),
        windows(texts[0][train_bytes:], validation_bytes, spread=True),
    )


def windows(text: bytes, limit: int, *, spread: bool = False) -> Tensor:
    """Cut a text into windows without overlap: the first ones, or some spread over all of it."""
    size = LENGTH + 1
    found = torch.frombuffer(bytearray(text[: len(text) // size * size]), dtype=torch.uint8).view(-1, size)
    wanted = limit // size
    return found[:: max(1, len(found) // max(1, wanted))][:wanted] if spread else found[:wanted]
