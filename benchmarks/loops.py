"""Training loops that `tacit compare` does not have, as runs of a grid: other optimizers, and a GAN.

Their recipes are named `optimizer:NAME`, which is `digits` with that optimizer, and `gan`: an AC-GAN (Odena
et al. 2017) in small on the same digits, with an optimizer for each of its two networks, which step together.
Its accuracy is the share of 1,000 digits made to order that the nearest real one gives the class asked for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.nn.parallel import DistributedDataParallel

import tacit
from arms import ranks
from launched import in_testbed, tell
from runs import Done, Run
from tacit_lab.recipes import digits
from tacit_lab.recipes.recipe import seeded
from tacit_lab.testbed.network import counters

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.015, momentum=0.9, weight_decay=5e-4),
    "rmsprop": partial(torch.optim.RMSprop, lr=3e-4),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
"""Of those that eDNNcomm's authors list, the ones that torch has."""
NOISE = 16
CLASSES = 10
MADE = 1000


def by_loop(group: Run, algorithms: Sequence[str]) -> Iterator[Done]:
    """Make runs by one launch; where that fails, each by a launch of its own."""
    about = {
        "recipe": group.recipe[0],
        "algorithms": [*algorithms],
        "seed": group.seed,
        "epochs": group.epochs,
    }
    try:
        found = in_testbed(group.cluster, [__file__, json.dumps(about)], timeout=1800)
    except SystemExit as error:
        if len(algorithms) == 1:
            yield Done(replace(group, algorithm=algorithms[0]), "failed", error=str(error))
        else:
            for algorithm in algorithms:
                yield from by_loop(group, [algorithm])
        return
    for algorithm, values in found.items():
        yield Done(replace(group, algorithm=algorithm), "ok", **values)


# ---- in a rank ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        loss: of the model as training calls it, and a batch.
        accuracy: of the model itself, 0..1.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Callable[..., Tensor]
    accuracy: Callable[[Any], float]


def rank_main(about: Mapping[str, Any]) -> None:
    """Train with each algorithm; rank 0 prints what came of it."""
    with ranks() as rank:
        found = {name: _trained(name, about) for name in about["algorithms"]}
        if rank == 0:
            tell(found)


def _trained(algorithm: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """A run; the same weights and the same batches for each algorithm, by the seed."""
    recipe, seed, epochs = digits.Digits(), about["seed"], about["epochs"]
    task = _task(about["recipe"], recipe, seed)
    steps = recipe.steps_per_epoch(dist.get_world_size())
    forward = DistributedDataParallel(task.model, gradient_as_bucket_view=True)
    session = tacit.attach(forward, task.optimizers, algorithm, steps_per_epoch=steps, epochs=epochs)
    torch.manual_seed(1000 * seed + dist.get_rank())
    dist.barrier()
    sent, start = counters.transmitted(os.environ["TACIT_INTERFACE"]), time.perf_counter()
    for epoch in range(epochs):
        for batch in recipe.train_batches(epoch, dist.get_rank(), dist.get_world_size(), seed):
            for optimizer in task.optimizers:
                optimizer.zero_grad()
            loss = task.loss(forward, *batch)
            loss.backward()
            session.observe(loss.detach())
            for optimizer in task.optimizers:
                optimizer.step()
    session.close()  # the replicas agree from here on
    seconds = time.perf_counter() - start
    sent = counters.transmitted(os.environ["TACIT_INTERFACE"]) - sent
    return {
        "accuracy": task.accuracy(task.model),
        "seconds": seconds,
        "steps": epochs * steps,
        "megabytes": sent * int(os.environ["TACIT_NODES"]) / 1e6,
        "parameters": sum(p.numel() for p in task.model.parameters()),
    }


def _task(name: str, recipe: digits.Digits, seed: int) -> Task:
    if name == "gan":
        return gan(seed)
    model = recipe.model(seed)
    return Task(
        model,
        [OPTIMIZERS[name.removeprefix("optimizer:")](model.parameters())],
        lambda forward, x, y: recipe.loss(forward(x), y),
        lambda model: recipe.evaluate(model)[1],
    )


# ---- the GAN ------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Generator and discriminator in one module, so that one exchange serves both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = _dense(NOISE + CLASSES, 128, 128, 64)
        self.discriminator = _dense(64, 128, 128, 1 + CLASSES)

    def make(self, y: Tensor) -> Tensor:
        """Digits of these classes, of shape (batch, 64)."""
        made: Tensor = self.generator(torch.cat([torch.randn(len(y), NOISE), one_hot(y, CLASSES)], 1))
        return made

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both networks' losses in one; neither's gradient holds anything of the other's loss."""
        made = self.make(y)
        learns = _judged(self.discriminator(x.flatten(1)), y, real=1.0)
        learns = learns + _judged(self.discriminator(made.detach()), y, real=0.0)
        held = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        return learns + _judged(functional_call(self.discriminator, held, (made,)), y, real=1.0)


def gan(seed: int) -> Task:
    """With an Adam for each network, as in eDNNcomm's scripts."""
    model = seeded(Pair, seed)
    assert isinstance(model, Pair)
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999))
        for part in (model.discriminator, model.generator)
    ]
    return Task(model, optimizers, lambda forward, x, y: forward(x, y), recognised)


def recognised(model: Pair) -> float:
    """Of 1,000 digits made to order, the share whose nearest real one is of the class asked for."""
    real = [*digits.Digits().train_batches(0, 0, 1, seed=0)]
    x, classes = (torch.cat(parts) for parts in zip(*real, strict=True))
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y = torch.arange(MADE) % CLASSES
        nearest = torch.cdist(model.make(y), x.flatten(1)).argmin(1)
    return float((classes[nearest] == y).float().mean())


def _dense(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, width in pairwise(widths):
        layers += [nn.Linear(before, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def _judged(scores: Tensor, y: Tensor, real: float) -> Tensor:
    """How far the scores are from saying real (1) or made (0), and the class."""
    source = binary_cross_entropy_with_logits(scores[:, 0], torch.full((len(y),), real))
    return source + cross_entropy(scores[:, 1:], y)


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))
