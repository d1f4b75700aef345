"""Train a recipe with one algorithm on this rank, and record how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tacit.api.attach import attach
from tacit.api.attached import Attached, measure_consensus
from tacit.planning.decider import Choice
from tacit.strategy import AnyStrategy
from tacit.timelines import Timeline
from tacit_lab.recipes.curves import NO_CURVES, Curves
from tacit_lab.recipes.meter import Meter, mean_over_ranks
from tacit_lab.recipes.progress import Progress
from tacit_lab.recipes.recipe import Recipe, optimizer_of
from tacit_lab.recipes.timing import Timekeeper
from tacit_lab.records import (
    CHOOSING,
    COMPUTE_ONLY,
    EndRecord,
    Environment,
    EpochRecord,
    Record,
    RunKey,
    RunRecord,
)

EVERY = 0.25
"""Seconds between two progress messages."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train; the same on all ranks.

    Attributes:
        strategy: What to attach; None to train without communication.
        rate: What the recipe's learning rate is multiplied by.
        target: The accuracy to reach, 0..1.
        cluster: The cluster's text form, for the records.
        shaped: Whether its links are shaped, for the records.
    """

    strategy: AnyStrategy | None
    epochs: int
    seed: int
    target: float
    cluster: str
    shaped: bool
    rate: float = 1.0

    @property
    def algorithm(self) -> str:
        """The name in the records: the strategy's text form."""
        return COMPUTE_ONLY if self.strategy is None else self.strategy.name

    @property
    def key(self) -> RunKey:
        """What its records belong to."""
        return RunKey(self.algorithm, self.seed, self.rate)


class TrainingSession(Protocol):
    """What training needs of a session; `tacit.attach` returns one."""

    @property
    def choice(self) -> Choice | None:
        """What `auto` has chosen, if it has."""

    def observe(self, loss: torch.Tensor) -> None:
        """Take the loss of this step."""

    def flush(self) -> None:
        """Wait for exchanges under way."""

    def sync(self) -> None:
        """Make the replicas equal."""

    def metrics(self) -> Mapping[str, Any]:
        """The session's numbers."""

    def servers(self) -> Sequence[Mapping[str, Any]]:
        """The counts of its parameter servers."""

    def timeline(self) -> Timeline | None:
        """The timeline of this rank; None if none is kept."""


class NoSession:
    """Stands for a session in training without communication. It does nothing."""

    choice = None

    def observe(self, loss: torch.Tensor) -> None:
        """Does nothing with the loss."""

    def flush(self) -> None:
        """Does nothing, as there are no exchanges."""

    def sync(self) -> None:
        """Does nothing: the replicas stay different."""

    def metrics(self) -> Mapping[str, Any]:
        """No numbers."""
        return {}

    def servers(self) -> Sequence[Mapping[str, Any]]:
        """No servers."""
        return []

    def timeline(self) -> None:
        """None, as no timeline is kept."""


@dataclass(frozen=True)
class TrainingReplica:
    """One rank's model, optimizer and session.

    Attributes:
        module: The model itself, for evaluation.
        forward: What training calls: the model, in DDP if there is a strategy.
        session: The strategy's session.
    """

    module: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    session: TrainingSession


def train(
    task: Task,
    recipe: Recipe,
    record: Callable[[Record], None],
    curves: Curves = NO_CURVES,
    keep: Callable[[Timeline], None] = lambda timeline: None,
) -> None:
    """Train to the end. A collective call: every rank of the default process group makes it.

    Rank 0 prints progress messages.

    Args:
        record: Takes each record; one rank gives it.
        curves: Takes numbers by step; one rank gives it.
        keep: Takes the timelines of all ranks; rank 0 gives it.

    Raises:
        TacitError: The algorithm does not fit the model, or a round failed.
    """
    with _replica(task, recipe) as replica:
        record(_head(task, recipe, replica))
        run = _TrainingRun(task, recipe, replica, record, curves)
        for epoch in range(task.epochs):
            run.epoch(epoch)
        for timeline in run.times.gather():
            keep(timeline)
        record(run.end())


@contextmanager
def _replica(task: Task, recipe: Recipe) -> Iterator[TrainingReplica]:
    module = recipe.model(task.seed)
    optimizer = optimizer_of(recipe, module, task.strategy, task.rate)
    if task.strategy is None:
        yield TrainingReplica(module, module, optimizer, NoSession())
        return
    # All ranks have made the same parameters, from the seed.
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False)
    steps = recipe.steps_per_epoch(dist.get_world_size())
    with attach(
        model, optimizer, task.strategy, steps_per_epoch=steps, epochs=task.epochs, seed=task.seed
    ) as session:
        yield TrainingReplica(module, model, optimizer, session)


def _head(task: Task, recipe: Recipe, replica: TrainingReplica) -> RunRecord:
    return RunRecord(
        algorithm=task.algorithm,
        strategy="" if task.strategy is None else repr(task.strategy),
        recipe=recipe.name,
        cluster=task.cluster,
        shaped=task.shaped,
        seed=task.seed,
        rate=task.rate,
        epochs=task.epochs,
        target=task.target,
        batch_per_rank=recipe.batch,
        world_size=dist.get_world_size(),
        parameters=sum(parameter.numel() for parameter in replica.module.parameters()),
        environment=Environment.here(),
    )


class _TrainingRun:
    """A training under way, and what it has measured so far."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        replica: TrainingReplica,
        record: Callable[[Record], None],
        curves: Curves,
    ) -> None:
        self._task, self._recipe, self._replica = task, recipe, replica
        self._record, self._curves = record, curves
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._steps = task.epochs * recipe.steps_per_epoch(self._world)
        self._rates = [group["lr"] for group in replica.optimizer.param_groups]
        self._meter = Meter(self._by_servers)
        self.times = Timekeeper(task.algorithm, replica.session, self._steps)
        self._epoch = self._step = 0
        self._reported = 0.0
        self._loss = float("nan")
        self._late_losses: list[torch.Tensor] = []
        self._accuracy: float | None = None
        self._to_target: float | None = None

    def epoch(self, epoch: int) -> None:
        """Train an epoch, and evaluate. The time of the last epoch includes making the replicas equal."""
        with self._meter.window():
            self.times.began()
            for inputs, targets in self._recipe.train_batches(
                epoch, self._rank, self._world, self._task.seed
            ):
                self._report_sometimes(self._train(inputs, targets))
            self._replica.session.flush()
            if epoch + 1 == self._task.epochs:
                self._replica.session.sync()
        self.times.paused(self._step)
        self._epoch += 1
        session = self._replica.session
        if self._epoch < self._task.epochs and isinstance(session, Attached):
            measure_consensus(session)  # after the last epoch `sync` has, before it made them equal
        self._evaluate()
        self._record(self._epoch_record())
        self._report(self._meter.seconds, self._loss, self._megabytes())

    def _by_servers(self) -> int:
        """Bytes that the servers' nodes have sent; one rank calls this."""
        return sum(each["transmitted"] or 0 for each in self._replica.session.servers())

    def _metrics(self) -> dict[str, Any]:
        servers = [dict(each) for each in self._replica.session.servers()] if self._rank == 0 else []
        numbers = dict(self._replica.session.metrics())
        if (choice := self._replica.session.choice) is not None:
            numbers["choice"] = choice.to_json()
        return {**numbers, "servers": servers} if servers else numbers

    def end(self) -> EndRecord:
        """The last record."""
        training_loss, validation = self._chosen_by()
        return EndRecord(
            **self._task.key._asdict(),
            status="ok",
            seconds=self._meter.seconds,
            steps=self._step,
            mb_between_nodes=self._megabytes(),
            accuracy=self._accuracy,
            loss=self._loss,
            seconds_to_target=self._to_target,
            validation=validation,
            training_loss=training_loss,
            metrics=self._metrics(),
            traffic=None if self._meter.traffic is None else self._meter.traffic.matrix,
        )

    def _train(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._set_rate()
        self._replica.optimizer.zero_grad()
        loss = self._recipe.loss(self._replica.forward(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._replica.session.observe(loss)
        self._replica.optimizer.step()
        self._step += 1
        if self._step > self._steps - max(1, self._steps // 10):
            self._late_losses.append(loss.detach())
        self._curves.batch(self._step, loss)
        return loss

    def _chosen_by(self) -> tuple[float, ...]:
        """The loss of the last steps; and what rates are chosen by, without data for it minus that loss."""
        loss = float(torch.stack(self._late_losses).mean())
        held = self._recipe.validate(self._replica.module) if self._task.seed == CHOOSING else None
        return mean_over_ranks(loss, -loss if held is None else held)

    def _set_rate(self) -> None:
        """Set the learning rate of this step, from the share of the run at its middle."""
        factor = self._recipe.rate((self._step + 0.5) / self._steps)
        for group, rate in zip(self._replica.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _evaluate(self) -> None:
        """Each rank evaluates its own replica; loss and accuracy are the means over the ranks."""
        own = self._recipe.evaluate(self._replica.module, self._rank, self._world)
        self._loss, self._accuracy = mean_over_ranks(*own)
        self._curves.held_out(self._step, self._loss, self._accuracy)
        if self._accuracy >= self._task.target and self._to_target is None:
            self._to_target = self._meter.seconds

    def _epoch_record(self) -> EpochRecord:
        assert self._accuracy is not None
        numbers = self._replica.session.metrics()
        return EpochRecord(
            **self._task.key._asdict(),
            epoch=self._epoch,
            step=self._step,
            seconds=self._meter.seconds,
            loss=self._loss,
            accuracy=self._accuracy,
            bytes_between_nodes=self._meter.transmitted,
            consensus_distance=numbers.get("consensus_distance"),
            consensus_relative=numbers.get("consensus_relative"),
        )

    def _megabytes(self) -> float | None:
        sent = self._meter.transmitted
        return None if sent is None else sent / 1e6

    def _report_sometimes(self, loss: torch.Tensor) -> None:
        """Print a message at most a few times a second, so that messages cost the run nothing."""
        if self._rank == 0 and time.perf_counter() - self._reported > EVERY:
            seconds, megabytes = self._meter.live()
            self._report(seconds, loss.item(), megabytes)

    def _report(self, seconds: float, loss: float, megabytes: float | None) -> None:
        if self._rank != 0:
            return
        self._reported = time.perf_counter()
        self._curves.numbers(self._step, self._replica.session)
        message = Progress(
            algorithm=self._task.algorithm,
            epoch=self._epoch,
            step=self._step,
            steps=self._steps,
            seconds=seconds,
            loss=loss,
            accuracy=self._accuracy,
            mb=megabytes,
        )
        print(message.to_line(), flush=True)
