"""Which trainings make up a data set, and what they are for: learnt from, or held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tacit import checks
from tacit.algorithms.localsgd import localsgd
from tacit.errors import ConfigError, NonFinite, unknown
from tacit.strategy import AnyStrategy
from tacit_lab import recipes
from tacit_lab.predictor_training.layers import Layer, Recorder
from tacit_lab.predictor_training.simulation import Simulation
from tacit_lab.predictor_training.synthetic import MadeUp
from tacit_lab.recipes import Choices
from tacit_lab.recipes import models as networks
from tacit_lab.recipes.recipe import Recipe

MADE_UP = "made-up"
"""The name of the data set of made-up images, besides the recipes of `tacit compare`."""
OF_IMAGES = (MADE_UP, "cifar10", "mnist")
"""What takes a network of choice."""
WITH_FILES = ("cifar10", "mnist")
LEAST = 6
"""Rounds of a phase."""


@dataclass(frozen=True)
class TrainingRun:
    """One training.

    Attributes:
        data: a recipe's name, or "made-up".
        model: the network, if there is a choice; "": the recipe's.
        rate: what the recipe's learning rate is multiplied by.
        split: "train", or why it is held out: "architecture" or "data".
    """

    data: str
    model: str = ""
    rate: float = 1.0
    seed: int = 0
    split: str = "train"

    @property
    def name(self) -> str:
        """All that decides it."""
        return f"{self.data}{self.model and f' {self.model}'}, rate {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class Sampling:
    """What is recorded of a run.

    Attributes:
        rounds: the number of recorded rounds, in `phases` spans of equal length from the first round to the
            last.
        length: rounds of the run; None: as many as are recorded.
        every: steps of the optimizer from one round to the next.
        elements: of each parameter, at most.
        share: of which part of a layer its swing is measured.
        workers: how many replicas average their progress.
        algorithm: the algorithm that exchanges; None: everything is pushed.
    """

    rounds: int = 120
    phases: int = 3
    length: int | None = None
    every: int = 4
    elements: int = 128
    share: float = 0.4
    workers: int = 4
    algorithm: AnyStrategy | None = None

    def __post_init__(self) -> None:
        checks.whole("phases", self.phases, 1, None, "3 are usual: the beginning, the middle, the end")
        least = LEAST * self.phases
        checks.whole("rounds", self.rounds, least, None, "a phase of 40 is usual, and 6 are the least")
        if self.length is not None:
            checks.whole(
                "length", self.length, self.rounds, None, "it is no less than rounds; or leave it out"
            )
        checks.whole("every", self.every, 1, None, "1 records every step")
        checks.whole("elements", self.elements, 1, None, "128 of each layer are usual")
        checks.whole("workers", self.workers, 1, None, "4 are usual")
        checks.real("share", self.share, "0.4 is usual", above=0, most=1)

    def phase_of(self, number: int) -> int | None:
        """The number of a round's recorded span; None: it is not recorded."""
        width = self.rounds // self.phases
        room = (self.length or self.rounds) - width
        starts = [i * room // max(1, self.phases - 1) for i in range(self.phases)]
        return next((i for i, start in enumerate(starts) if start <= number < start + width), None)


def plan(
    data: Sequence[str],
    models: Sequence[str],
    *,
    rates: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    hold_model: str | None = None,
    hold_data: str | None = None,
) -> list[TrainingRun]:
    """The runs of a data set: each data set with each network, learning rate and seed.

    Held out are one architecture (`hold_model`, on the data sets of images that are learnt from) and one
    data set (`hold_data`), with the first rate and seed only.

    Raises:
        ConfigError: a name is unknown, given twice, or both learnt from and held out; or nothing is left.
    """
    _check_names("recipe", data, [MADE_UP, *recipes.known()])
    _check_names("model", [*models, *([hold_model] if hold_model else [])], networks.known())
    if hold_data is not None and hold_data not in data:
        raise ConfigError(
            f"{hold_data} cannot be held out, as {', '.join(data)} are recorded: record it, too, or hold out "
            "one of these"
        )
    learnt = [each for each in data if each != hold_data]
    runs = [
        TrainingRun(each, model, rate, seed)
        for each in learnt
        for model in (models if each in OF_IMAGES else [""])
        for rate in rates
        for seed in seeds
    ]
    if not runs:
        raise ConfigError("nothing is left to learn from: record another recipe, or hold none out")
    first = TrainingRun(data="", rate=rates[0], seed=seeds[0])
    if hold_model is not None:
        others = [each for each in learnt if each in OF_IMAGES]
        runs += [replace(first, data=each, model=hold_model, split="architecture") for each in others]
    if hold_data is not None:
        own = models[0] if hold_data in OF_IMAGES else ""
        runs.append(replace(first, data=hold_data, model=own, split="data"))
    return runs


def _check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise unknown(kind, name, known)
        if given.count(name) > 1:
            raise ConfigError(
                f"{kind} {name!r} is there twice: what is held out is not learnt from; name it once"
            )


def recipe_of(data: str, model: str = "", path: Path | None = None) -> Recipe:
    """The recipe of a run.

    Raises:
        ConfigError: there is none of this name, or it takes no such model or path.
    """
    if data == MADE_UP:
        return MadeUp(model or "lenet")
    return recipes.get(data, Choices(model=model or None, data=path))


def record(
    runs: Sequence[TrainingRun],
    sampling: Sampling,
    *,
    path: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Layer]:
    """Train each run, and yield the recorded layers.

    Args:
        path: where the images of cifar10 or mnist are.
        tell: gets a line about each run when it ends.

    Raises:
        ConfigError: a run's data is missing or too little, or a training has failed to stay finite.
    """
    filed = {run.data for run in runs} & {*WITH_FILES}
    if path is not None and len(filed) != 1:
        raise ConfigError(
            f"--data {path} is for cifar10 or mnist, and {' and '.join(sorted(filed)) or 'none'} is "
            "recorded: record one of them at a time"
        )
    made = {run: recipe_of(run.data, run.model, path if run.data in filed else None) for run in runs}
    for run, recipe in made.items():
        yield from _recorded(run, recipe, sampling, tell)


def _recorded(
    run: TrainingRun, recipe: Recipe, sampling: Sampling, tell: Callable[[str], None]
) -> list[Layer]:
    rounds = sampling.length or sampling.rounds
    simulation = Simulation(
        recipe,
        sampling.algorithm or localsgd(sync_every=sampling.every),
        workers=sampling.workers,
        steps=rounds * sampling.every,
        seed=run.seed,
        rate=run.rate,
    )
    recorder = Recorder(
        simulation.model,
        run=run.name,
        split=run.split,
        elements=sampling.elements,
        share=sampling.share,
        seed=run.seed,
    )
    try:
        for each in simulation.rounds():
            phase = sampling.phase_of(each.number)
            if phase is not None:
                recorder.note(phase, each)
    except NonFinite as error:
        raise ConfigError(f"the training {run.name} did not stay finite: write lower --rates") from error
    layers = recorder.layers()
    loss, accuracy = simulation.evaluate()
    tell(f"{run.name}: {len(layers)} layers, loss {loss:.3f}, accuracy {accuracy:.3f} ({run.split})")
    return layers
