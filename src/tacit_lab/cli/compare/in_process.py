"""Make the runs of a comparison with all replicas of a run in one process: no network, and no seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean

from tacit.algorithms import parse
from tacit.errors import TacitError, TestbedError
from tacit.strategy import AnyStrategy
from tacit_lab import recipes
from tacit_lab.cli.compare.display import Display
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.cli.compare.recorder import ComparisonRecorder
from tacit_lab.cli.compare.run_keys import missing, place
from tacit_lab.recipes.progress import Progress
from tacit_lab.records import CHOOSING, EndRecord, Environment, EpochRecord, Record, RunKey, RunRecord
from tacit_lab.study.carrying_out import say, train_at_once
from tacit_lab.study.replicas import Replicas

EVERY = 2.0
"""Seconds between two progress messages of a run."""


def train_all(options: CompareOptions, display: Display, recorder: ComparisonRecorder) -> None:
    """Make each run that is missing, as many at once as there are cores; the recorder keeps the records.

    Raises:
        TestbedError: An algorithm failed; the others have been trained.
        Interrupted: A signal came.
    """
    failed: dict[str, str] = {}
    begun = set[RunKey]()
    recipe = recipes.get(options.recipe, options.choices)
    parameters = sum(each.numel() for each in recipe.model(0).parameters())

    def due() -> Iterator[RunKey]:
        return (key for key in missing(options, recorder.ends) if key.algorithm not in failed)

    def begin(key: RunKey) -> None:
        ends = recorder.ends
        display.started(options.label(key), place(options, ends, len(begun - {*ends})))
        begun.add(key)
        head = RunRecord(
            **key._asdict(),
            strategy=repr(_strategy(key)),
            recipe=recipe.name,
            cluster=str(options.cluster),
            shaped=False,
            in_process=True,
            epochs=options.epochs,
            target=options.target,
            batch_per_rank=recipe.batch,
            world_size=options.cluster.world_size,
            parameters=parameters,
            environment=Environment.here(),
        )
        recorder.add(head)

    def keep(key: RunKey, records: list[Record]) -> None:
        for record in records:
            recorder.add(record)

    def fail(key: RunKey, error: Exception) -> None:
        why = str(error) if isinstance(error, TacitError) else f"{type(error).__name__}: {error}"
        recorder.add(EndRecord(**key._asdict(), status="failed", error=why))
        failed[key.algorithm] = f"{options.label(key)} failed: {why}"

    train = partial(_train, replace(options, strategies=()))  # a process makes its own of the names
    cores = len(os.sched_getaffinity(0))
    train_at_once(due, train, keep, fail, begin=begin, hear=display.advanced, jobs=cores)
    if failed:
        raise TestbedError("\n".join(failed.values()))


def _strategy(key: RunKey) -> AnyStrategy:
    """The algorithm; in place of DDP, whose exchange is torch's own, one that computes the same."""
    strategy = parse(key.algorithm)
    exchanged = any(level.subject != "nothing" for level in strategy.levels)
    return strategy if exchanged else parse("dense")


def _train(options: CompareOptions, key: RunKey) -> list[Record]:
    """The records of one run, which is made in this process, behind the first."""
    return _Training(options, key).train()


class _Training:
    """One run."""

    def __init__(self, options: CompareOptions, key: RunKey) -> None:
        self._options, self._key, self._began = options, key, time.monotonic()
        self._told = self._began
        cluster, self._recipe = options.cluster, recipes.get(options.recipe, options.choices)
        self._each = self._recipe.steps_per_epoch(cluster.world_size)
        self._steps = self._each * (options.epochs or 0)
        self._replicas = Replicas(
            self._recipe,
            _strategy(key),
            steps=self._steps,
            seed=key.seed,
            rate=key.rate,
            workers=cluster.world_size,
            ranks_per_node=cluster.ranks_per_node,
        )
        self._epochs: list[EpochRecord] = []

    def train(self) -> list[Record]:
        """Train to the end."""
        done = self._replicas.train(self._stepped)
        held = self._recipe.validate(done.model) if self._key.seed == CHOOSING else None
        last = self._evaluated(done.steps)
        end = EndRecord(
            **self._key._asdict(),
            status="ok",
            steps=done.steps,
            mb_by_count=done.sent / 1e6,
            accuracy=last.accuracy,
            loss=last.loss,
            validation=-done.loss if held is None else held,
            training_loss=done.loss,
        )
        return [*self._epochs, end]

    def _stepped(self, step: int, loss: float) -> None:
        if time.monotonic() - self._began > self._options.timeout:
            raise TestbedError(f"it was stopped after {self._options.timeout:g} s, see --timeout")
        if step % self._each == 0 and step < self._steps:
            self._evaluated(step)
        elif time.monotonic() - self._told > EVERY:
            self._say(step, loss)

    def _evaluated(self, step: int) -> EpochRecord:
        """Each replica is evaluated; loss and accuracy are the means over them."""
        models = self._replicas.models
        own = [self._recipe.evaluate(each, rank, len(models)) for rank, each in enumerate(models)]
        record = EpochRecord(
            **self._key._asdict(),
            epoch=len(self._epochs) + 1,
            step=step,
            seconds=None,
            loss=fmean(loss for loss, _ in own),
            accuracy=fmean(accuracy for _, accuracy in own),
            bytes_between_nodes=None,
            bytes_by_count=self._replicas.sent,
        )
        self._epochs.append(record)
        self._say(step, record.loss)
        return record

    def _say(self, step: int, loss: float | None) -> None:
        self._told = time.monotonic()
        say(
            Progress(
                algorithm=self._options.label(self._key),
                epoch=len(self._epochs),
                step=step,
                steps=self._steps,
                seconds=self._told - self._began,
                loss=loss,
                accuracy=self._epochs[-1].accuracy if self._epochs else None,
                mb=None,
            )
        )
