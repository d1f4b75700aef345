"""Predict the next byte of Python's standard library, by a small transformer."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tacit.errors import ConfigError
from tacit_lab.recipes.models.gpt import GPT
from tacit_lab.recipes.recipe import Batch, Recipe, seeded, shard

LENGTH = 128
"""Bytes in a sample."""
STEPS = 120
"""Steps in an epoch, so that one is a reasonable wait at 100 Mbit/s; the source would give more."""
TRAIN_BYTES = 2_000_000
HELD_OUT_BYTES = 12_288
EVALUATED = 128
"""Windows at once."""
HELD_OUT_EVERY = 10
"""Of the source files, sorted by name, every tenth is held out."""


class Bytes(Recipe):
    """A language model: every parameter is used at every step, by Adam, whose state makes it sensitive."""

    name = "bytes"
    epochs = 2
    target = 0.4
    batch = 8

    def __init__(self, held_out: int = HELD_OUT_BYTES) -> None:
        """Judge by about so many bytes."""
        self._held_out = held_out

    def model(self, seed: int) -> nn.Module:
        """Three blocks of width 128 over a context of 128 bytes."""
        return seeded(lambda: GPT(vocabulary=256, length=LENGTH, width=128, heads=4, blocks=3), seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for all parameters."""
        return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def steps_per_epoch(self, world: int) -> int:
        """At most 120; fewer if there is too little text for so many ranks."""
        return min(STEPS, len(_data(self._held_out).train) // (world * self.batch))

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Windows of shape (batch, 128), and the same windows one byte later."""
        windows = _data(self._held_out).train
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
        windows = _data(self._held_out).held_out.long()
        loss, right = 0.0, 0
        with torch.inference_mode():
            for some in torch.split(windows, EVALUATED):
                outputs = model(some[:, :-1])
                right += int((outputs.argmax(2) == some[:, 1:]).sum())
                loss += float(self.loss(outputs, some[:, 1:])) * len(some)
        return loss / len(windows), right / windows[:, 1:].numel()


class _BytesData(NamedTuple):
    train: Tensor
    held_out: Tensor


@cache
def _data(held_out_bytes: int = HELD_OUT_BYTES) -> _BytesData:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    if len(files) <= HELD_OUT_EVERY:
        raise ConfigError(f"the recipe 'bytes' reads Python's own source, and {library} holds almost none")
    held_out = files[::HELD_OUT_EVERY]
    train = [path for path in files if path not in held_out]
    return _BytesData(_windows(train, TRAIN_BYTES), _windows(held_out, held_out_bytes, spread=True))


def _windows(paths: Iterable[Path], limit: int, *, spread: bool = False) -> Tensor:
    """Cut files into windows of LENGTH + 1 bytes without overlap: the first ones, or some spread over all."""
    text = b"".join(path.read_bytes() for path in paths)
    size = LENGTH + 1
    windows = torch.frombuffer(bytearray(text[: len(text) // size * size]), dtype=torch.uint8).view(-1, size)
    wanted = limit // size
    return windows[:: max(1, len(windows) // wanted)][:wanted] if spread else windows[:wanted]
