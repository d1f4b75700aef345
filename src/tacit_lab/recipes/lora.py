"""Fine-tune a language model by low-rank adapters: few parameters learn and travel, all others are frozen.

No weights are downloaded: the base is the network of `bytes`, which is trained on Python's source, once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tacit.errors import ConfigError
from tacit_lab.recipes.bytes import HELD_OUT_BYTES, TRAIN_BYTES, VALIDATION_BYTES, Bytes, TextWindows, windows
from tacit_lab.recipes.data.cache import kept
from tacit_lab.recipes.recipe import seeded

RANK = 8
"""Of what is added to a matrix."""
BASE_EPOCHS = 3
"""The base's: 360 steps of one process."""
TOLD_EVERY = 60
HELD_OUT_EVERY = 10
"""Of the manual's topics, sorted by name, every tenth is held out, and another by which rates are chosen."""


class Lora(Bytes):
    """From Python's source to the English of its manual, byte by byte."""

    name = "lora"
    epochs = 2
    target = 0.285
    steps = 60

    def data(self) -> TextWindows:
        """The manual that Python's `help` shows."""
        return _data()

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Train the base, unless it is kept."""
        _base(tell)

    def model(self, seed: int) -> nn.Module:
        """The base, frozen, with adapters of 49,152 parameters. The base is trained where it is not kept."""
        network = _base()
        network.requires_grad_(False)
        return seeded(lambda: _adapted(network), seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for the adapters."""
        learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(learnt, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)


class Adapter(nn.Module):
    """A linear layer, and a product of two small matrices that is added to its own.

    Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1, alpha = r.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Draw the first from a normal distribution; the second is zeros, so that nothing changes yet."""
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) * layer.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        mapped: Tensor = self.layer(x)
        return mapped + linear(linear(x, self.down), self.up)


def _adapted(network: nn.Module) -> nn.Module:
    """The network with an adapter around each linear layer, put in place."""
    for parent in [*network.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Adapter(layer))
    return network


def _base(tell: Callable[[str], None] = lambda line: None) -> nn.Module:
    """The base's network, from the cache if it was trained before. If ranks come at once, one trains it."""
    recipe = Bytes()
    network = recipe.model(0)
    about = f"{torch.__version__} {BASE_EPOCHS} {recipe.steps} {zlib.crc32(recipe.data().train.numpy().data)}"
    name = f"lora-{hashlib.blake2b(about.encode(), digest_size=8).hexdigest()}.base"
    weights = torch.frombuffer(kept(name, lambda: _trained(network, recipe, tell)), dtype=torch.float32)
    nn.utils.vector_to_parameters(weights, network.parameters())
    return network


def _trained(network: nn.Module, recipe: Bytes, tell: Callable[[str], None]) -> bytes:
    """All parameters of the network, once it is trained."""
    optimizer, steps = recipe.optimizer(network), recipe.steps_per_epoch(1)
    for epoch in range(BASE_EPOCHS):
        for step, (inputs, targets) in enumerate(recipe.train_batches(epoch, 0, 1, 0), epoch * steps):
            if step % TOLD_EVERY == 0:
                tell(f"lora: its base is trained first, and kept: step {step} of {BASE_EPOCHS * steps}")
            optimizer.zero_grad()
            recipe.loss(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return nn.utils.parameters_to_vector(network.parameters()).detach().numpy().tobytes()


@cache
def _data() -> TextWindows:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigError("the recipe 'lora' reads the manual of help(), which this Python lacks") from error
    names = sorted(topics)
    held_out, chosen_by = names[::HELD_OUT_EVERY], names[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    train = [name for name in names if name not in (*held_out, *chosen_by)]
    texts = ["".join(topics[name] for name in some).encode() for some in (train, held_out, chosen_by)]
    return TextWindows(
        windows(texts[0], TRAIN_BYTES),
        windows(texts[1], HELD_OUT_BYTES, spread=True),
        windows(texts[2], VALIDATION_BYTES, spread=True),
    )
