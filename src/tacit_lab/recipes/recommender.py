"""Recommend the next of 50,000 items: made-up sessions, and a network that is nearly all embedding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from tacit_lab.recipes.recipe import Batch, Recipe, seeded, shard

ITEMS, WIDTH = 50_000, 64
GENRES = 100
"""Which items belong together; no network is told."""
SEEN, OFFERED = 20, 10
"""Items in a history, and those of which one comes next."""
LOYAL = 0.8
"""The share of items, seen and next, that are of the user's own genres."""
TRAIN, HELD_OUT = 300_000, 4096
STEPS = 60
"""Steps in an epoch, so that few sessions come twice: those that do are soon known by heart."""


class Recommender(Recipe):
    """Sessions of users, each with two of 100 genres; some items are far more popular than most.

    The gradient of the embedding is dense, as `torch.nn.Embedding` makes it, but has rows of zeros for all
    items that are not in the batch.
    """

    name = "recommender"
    epochs = 2
    target = 0.55
    batch = 512

    def model(self, seed: int) -> nn.Module:
        """Two towers on one embedding of 50,000 x 64: 3,208,320 parameters."""
        return seeded(Towers, seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam, which gives rows that are rarely seen steps of the same size."""
        return torch.optim.Adam(model.parameters(), lr=2e-2)

    def steps_per_epoch(self, world: int) -> int:
        """At most 60; fewer on ranks too many for 300,000 sessions."""
        return min(STEPS, TRAIN // (world * self.batch))

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Items of shape (batch, 30), those seen before those offered, and which of these 10 came next."""
        items, targets = _data().train
        steps = self.steps_per_epoch(world)
        for chosen in shard(TRAIN, self.batch, steps=steps, epoch=epoch, rank=rank, world=world, seed=seed):
            yield items[chosen].long(), targets[chosen]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy over the items that were offered."""
        return cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        """Loss, and how often the next item is the first choice of ten, in 4,096 sessions, on every rank."""
        return self._judged(model, _data().held_out)

    @property
    def validation(self) -> int:
        """Sessions that are in neither."""
        return HELD_OUT

    def validate(self, model: nn.Module) -> float | None:
        """How often the first choice is right in those."""
        return self._judged(model, _drawn(1, HELD_OUT))[1]

    def _judged(self, model: nn.Module, sessions: _Sessions) -> tuple[float, float]:
        items, targets = sessions
        with torch.inference_mode():
            outputs = model(items.long())
            right = (outputs.argmax(1) == targets).float().mean()
            return float(self.loss(outputs, targets)), float(right)


class Towers(nn.Module):
    """Scores of items by what a user has seen.

    Source: Covington et al. 2016, "Deep Neural Networks for YouTube Recommendations", section 3, in small.
    """

    def __init__(self) -> None:
        """Draw the embedding from a normal distribution of deviation 0.1."""
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, items: Tensor) -> Tensor:
        """Map items seen and offered, (batch, 20 + 10), to scores of the offered, (batch, 10)."""
        seen, offered = self.items(items).split([SEEN, OFFERED], dim=1)
        user = seen.mean(1)
        user = user + self.narrow(relu(self.wide(user)))
        scores: Tensor = (offered @ user.unsqueeze(2)).squeeze(2)
        return scores


class _Sessions(NamedTuple):
    items: Tensor
    targets: Tensor


class _Data(NamedTuple):
    train: _Sessions
    held_out: _Sessions


@cache
def _data() -> _Data:
    """The same for every seed of a training, so that no seed decides how hard the test is."""
    items, targets = _drawn(0, TRAIN + HELD_OUT)
    return _Data(_Sessions(items[:TRAIN], targets[:TRAIN]), _Sessions(items[TRAIN:], targets[TRAIN:]))


def _drawn(seed: int, count: int) -> _Sessions:
    draw = torch.Generator().manual_seed(seed)
    liked = torch.randint(GENRES, (count, 2), generator=draw)
    loyal = torch.rand(count, SEEN + 1, generator=draw) < LOYAL
    which = torch.randint(2, (count, SEEN + 1), generator=draw)
    genres = liked.gather(1, which).where(loyal, torch.randint(GENRES, loyal.shape, generator=draw))
    others = torch.randint(GENRES, (count, OFFERED), generator=draw)
    targets = torch.randint(OFFERED, (count,), generator=draw)
    others.scatter_(1, targets[:, None], genres[:, SEEN:])
    return _Sessions(_popular(torch.cat([genres[:, :SEEN], others], 1), draw), targets)


def _popular(genres: Tensor, draw: torch.Generator) -> Tensor:
    """An item of each genre; the chance of the n-th is as 1 / n, as sales of books and songs are."""
    places = ITEMS // GENRES
    weights = 1 / torch.arange(1, places + 1)
    chances = (weights / weights.sum()).cumsum(0)
    place = torch.searchsorted(chances, torch.rand(genres.shape, generator=draw)).clamp_(max=places - 1)
    # Neighbours in the table are of different genres.
    return (place * GENRES + genres).int()
