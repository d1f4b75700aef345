"""Replicas of a recipe's model in one process, which exchange by a strategy, without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit.prediction.predictor import kind_of
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session, Training
from tacit.session.buckets import exempting, group_names
from tacit.strategy import AnyStrategy
from tacit.transports.loopback import Loopback, LoopbackTransport
from tacit_lab.recipes.recipe import Batch, Recipe

CAP = 25 << 20
"""Bytes of a bucket, at most."""


class Round(NamedTuple):
    """What happened in one round, by parameter.

    Attributes:
        number: counted from 0.
        step: which the round followed, counted from 1; `lr`, the learning rate of that step.
        progress: the workers' mean progress since the round before.
        answer: what the anchor moved by: the same where everything is pushed.
    """

    number: int
    step: int
    lr: float
    progress: Mapping[str, Tensor]
    answer: Mapping[str, Tensor]


class Simulation:
    """Workers that each step on their own batches and then exchange progress by a strategy.

    The answer of a strategy with one all-reduce depends only on the mean of the workers' deltas; so one
    session gets that mean, and stands for all. Each worker has its optimizer and buffers.

    Args:
        algorithm: such as "mp2:budget=0.11", one that averages progress at steps known beforehand.
        steps: of the whole run, which the learning rate's course is made for.
        rate: what the recipe's learning rate is multiplied by.

    Raises:
        ConfigError: there is too little data for so many workers, or the algorithm is of another sort.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: str | AnyStrategy,
        *,
        workers: int = 4,
        steps: int,
        seed: int = 0,
        rate: float = 1.0,
    ) -> None:
        if not recipe.steps_per_epoch(workers):
            raise ConfigError(f"{recipe.name} has too little data for {workers} workers: write fewer")
        self.recipe, self.steps, self._seed = recipe, steps, seed
        self.model = recipe.model(seed)
        """At the anchor after each round; its buffers are those of the first worker."""
        self._models = [recipe.model(seed) for _ in range(workers)]
        self._optimizers = [recipe.optimizer(each) for each in self._models]
        self._rates = [rate * group["lr"] for group in self._optimizers[0].param_groups]
        self._strategy = _of_progress(parse(algorithm) if isinstance(algorithm, str) else algorithm)
        self.lr = 0.0

    def rounds(self) -> Iterator[Round]:
        """Train to the end; yields each round once its answer has been applied."""
        named = {name: p.detach() for name, p in self.model.named_parameters()}
        (level,) = self._strategy.levels

        def rates() -> dict[str, float]:
            return dict.fromkeys(named, self.lr)

        session = Session(
            level,
            named,
            LoopbackTransport(Loopback(1), 0),
            group_names(named, named, CAP),
            policy=exempting(level.compressor),
            training=Training(rates=rates, seed=self._seed),
        )
        door = OptimizerHook(session, named, rates=rates)
        before = {name: p.clone() for name, p in named.items()}
        number = count()
        try:
            for step, batches in zip(range(self.steps), self._batches(), strict=False):
                self._step(step, batches)
                self._gather(named)
                if not session.communicates():
                    door.after_step()
                    continue
                progress = {name: p - before[name] for name, p in named.items()}
                door.after_step()
                answer = {name: p - before[name] for name, p in named.items()}
                for name, p in named.items():
                    before[name].copy_(p)
                self._spread(named)
                yield Round(next(number), step + 1, self.lr, progress, answer)
        finally:
            session.close()

    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy (0..1) of the anchor on all held-out data."""
        return self.recipe.evaluate(self.model)

    def _batches(self) -> Iterator[list[Batch]]:
        """The batches of all workers in each step, epoch after epoch."""
        workers = len(self._models)
        for epoch in count():
            streams = [self.recipe.train_batches(epoch, rank, workers, self._seed) for rank in range(workers)]
            yield from map(list, zip(*streams, strict=True))

    def _step(self, step: int, batches: list[Batch]) -> None:
        factor = self.recipe.rate((step + 0.5) / self.steps)
        for model, optimizer, (inputs, targets) in zip(self._models, self._optimizers, batches, strict=True):
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
            self.recipe.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.lr = self._rates[0] * factor

    def _gather(self, named: Mapping[str, Tensor]) -> None:
        """The workers' mean, to the common model; and the first one's buffers."""
        everyone = [dict(model.named_parameters()) for model in self._models]
        for name, p in named.items():
            torch.mean(torch.stack([each[name].detach() for each in everyone]), 0, out=p)
        for mine, first in zip(self.model.buffers(), self._models[0].buffers(), strict=True):
            mine.copy_(first)

    def _spread(self, named: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for model in self._models:
                for name, p in model.named_parameters():
                    p.copy_(named[name])


def kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each parameter, one of `tacit.prediction.KINDS`."""
    return {name: kind_of(p.dim()) for name, p in model.named_parameters()}


def _of_progress(strategy: AnyStrategy) -> AnyStrategy:
    levels = strategy.levels
    if len(levels) != 1 or levels[0].subject != "delta" or levels[0].overlap.apply_at(0):
        raise ConfigError(
            f"{strategy.name} does not average progress at once in one level: write mp2 or localsgd, say"
        )
    return strategy
