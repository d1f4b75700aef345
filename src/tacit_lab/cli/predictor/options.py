"""The options of the commands of `tacit predictor`, parsed and checked before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tacit.errors import ConfigError, unknown
from tacit.files import output
from tacit.prediction.extrapolation import Exponential, Linear, Stale
from tacit.prediction.networks.loading import trained
from tacit.prediction.networks.mp2 import MP2
from tacit.prediction.networks.wnn import WNN
from tacit.prediction.predictor import Predictor
from tacit_lab.cli import parsing
from tacit_lab.cli.run.options import checked_script
from tacit_lab.predictor_training import dataset, script
from tacit_lab.predictor_training.evaluation import check
from tacit_lab.predictor_training.layers import Layer
from tacit_lab.predictor_training.runs import Sampling, TrainingRun, plan, recipe_of
from tacit_lab.predictor_training.synthetic import MadeUp
from tacit_lab.predictor_training.trials import Trial, predicting

NETWORKS = ("mp2", "wnn")
CANDIDATES: dict[str, Callable[[], Predictor]] = {
    "mp2": MP2,
    "wnn": WNN,
    "linear": Linear,
    "exponential": Exponential,
    "stale": Stale,
}
_MOST_SAMPLES = 1_000_000
"""Of a batch."""
_MOST_WORKERS = 1024
"""All of them are replicas in one process."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What `tacit predictor record` does.

    Attributes:
        runs: The trainings.
        sampling: What is recorded of each.
        images: Where the images of cifar10 or mnist are; None if they are not needed, or are cached.
        out: The file to write.
    """

    runs: Sequence[TrainingRun]
    sampling: Sampling
    images: Path | None
    out: Path


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """The checked options of `tacit predictor record -- SCRIPT`.

    Attributes:
        command: What is run.
        run: What the run is called in the record.
        sampling: What is recorded of it.
        out: The file to write.
    """

    command: Sequence[str]
    run: str
    sampling: Sampling
    seed: int
    out: Path


class GainTrials(NamedTuple):
    """The gains to choose from, and the trainings that decide."""

    gains: list[float]
    trials: list[Trial]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The checked options of `tacit predictor train`.

    Attributes:
        network: "mp2" or "wnn".
        arguments: Keyword arguments for the network's `train`.
        gain_trials: How the gain of mp2 is chosen; None for wnn, which has none.
        layers: The recorded layers to learn from.
        command: What was typed, for the note in the file.
        out: The file to write.
    """

    network: str
    arguments: Mapping[str, Any]
    gain_trials: GainTrials | None
    layers: Sequence[Layer]
    command: str
    out: Path


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What `tacit predictor evaluate` does.

    Attributes:
        trial: The training in which predictors are evaluated.
        predictors: By their names in the table.
        within: By what share the loss may be above that of the full push.
        moments: At how many moments models are put together of predictions.
        held_out: Recorded layers that no predictor has learnt from.
        out: The file for a page; None for no page.
    """

    trial: Trial
    predictors: Mapping[str, Predictor]
    within: float
    moments: int
    held_out: Sequence[Layer]
    out: Path | None


def planned(
    *, recipes: str, models: str, hold_model: str, hold_data: str, rates: str, seeds: str
) -> list[TrainingRun]:
    """The trainings that were typed.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    factors = parsing.numbers("--rates", rates, float)
    numbers = [parsing.seed("--seeds", each) for each in parsing.numbers("--seeds", seeds, int)]
    return plan(
        parsing.split(recipes),
        parsing.split(models),
        rates=factors,
        seeds=numbers,
        hold_model=None if hold_model == "none" else hold_model,
        hold_data=None if hold_data == "none" else hold_data,
    )


def check_record(
    runs: Sequence[TrainingRun],
    *,
    data: str | None,
    sampling: Mapping[str, Any],
    predictor: str | None,
    out: str,
) -> RecordOptions:
    """Parse and check what was typed.

    Args:
        sampling: The options that are fields of `Sampling`, by their names.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    images = parsing.path("--data", data)
    for name, value in sampling.items():
        if name != "share" and value is not None:
            parsing.at_most(f"--{name}", value, **({"most": _MOST_WORKERS} if name == "workers" else {}))
    file, target = parsing.path("--predictor", predictor), parsing.path("--out", out)
    assert target is not None
    what = Sampling(**sampling)
    output(target, "--out")
    if file is not None:
        what = _with_predictions(what, file)
    return RecordOptions(runs=runs, sampling=what, images=images, out=target)


OF_RECIPES = {
    "data": "--recipes",
    "models": "--models",
    "path": "--data",
    "hold_model": "--hold-model",
    "hold_data": "--hold-data",
    "rates": "--rates",
    "workers": "--workers",
    "loop": "--predictor",
}
"""Options that a script has no use for, by the names of the parameters."""


def check_script(
    words: Sequence[str], given: Sequence[str], *, seeds: str, sampling: Mapping[str, Any], out: str
) -> ScriptOptions:
    """Parse and check what was typed with a script.

    Args:
        given: The names of the parameters that were typed.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    useless = [OF_RECIPES[name] for name in given if name in OF_RECIPES]
    if useless:
        raise ConfigError(
            f"{', '.join(useless)} with a script would do nothing, as it decides itself what it trains: "
            "leave them out"
        )
    numbers = [parsing.seed("--seeds", each) for each in parsing.numbers("--seeds", seeds, int)]
    if len(numbers) != 1:
        raise ConfigError(
            f"--seeds {seeds} with a script: it runs once, and one seed decides which elements are recorded: "
            "write --seeds 0"
        )
    for name, value in sampling.items():
        if name != "share" and value is not None:
            parsing.at_most(f"--{name}", value)
    if words[0] != "torchrun":
        checked_script(tuple(words), "write for example tacit predictor record -- train.py --epochs 3")
    target = parsing.path("--out", out)
    assert target is not None
    what = Sampling(**sampling)
    output(target, "--out")
    return ScriptOptions(
        command=script.command(words), run=" ".join(words), sampling=what, seed=numbers[0], out=target
    )


def _with_predictions(what: Sampling, predictor: Path) -> Sampling:
    """Push a share only, and predict the rest with this file, while recording."""
    steps = (what.length or what.rounds) * what.every
    strategy = predicting(trained(str(predictor)), share=what.share, sync_every=what.every, steps=steps)
    return replace(what, algorithm=strategy)


def check_train(
    *,
    records: Sequence[str],
    network: str,
    mp2: Mapping[str, Any],
    gains: Mapping[str, Any],
    wnn: Mapping[str, Any],
    steps: int,
    batch: int,
    seed: int,
    out: str | None,
) -> TrainOptions:
    """Parse and check what was typed, and read the records.

    Args:
        mp2: Options for mp2 only, by their names; None where not given. `gains`: Those about its gain.
        wnn: Options for wnn only.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    files = parsing.paths("RECORDS", records)
    common = {
        "steps": parsing.at_most("--steps", steps),
        "batch": parsing.at_most("--batch", batch, most=_MOST_SAMPLES),
        "seed": parsing.seed("--seed", seed),
    }
    target = parsing.path("--out", out) or Path(f"{network}.pt")
    arguments = {**_own(network, mp2, gains, wnn), **common}
    trials = _gain_trials(gains, mp2["share"]) if network == "mp2" else None
    output(target, "--out")
    layers = [layer for path in files for layer in dataset.load(path) if layer.split == "train"]
    if not layers:
        raise ConfigError(
            f"everything in {', '.join(map(str, files))} is held out: record runs to learn from, too"
        )
    options = " ".join(f"--{name} {value}" for name, value in (arguments | _given(gains)).items())
    command = f"tacit predictor train {' '.join(map(str, files))} --network {network} {options}"
    return TrainOptions(
        network=network, arguments=arguments, gain_trials=trials, layers=layers, command=command, out=target
    )


def _own(
    network: str, mp2: Mapping[str, Any], gains: Mapping[str, Any], wnn: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that were given for this network, if none was given for the other one."""
    if network not in NETWORKS:
        raise unknown("network", network, NETWORKS)
    own, others = (mp2, wnn) if network == "mp2" else (wnn, {**mp2, **gains})
    for name, value in _given(others).items():
        raise ConfigError(f"--{name} {value} would do nothing for {network}: leave it out")
    return _given(own)


def _gain_trials(options: Mapping[str, Any], share: float | None) -> GainTrials:
    networks = parsing.split(options["tried-on"] or "vgg11-narrow")
    gains = parsing.numbers("--gains", options["gains"] or "1", float)
    every = 4 if options["sync-every"] is None else options["sync-every"]
    trials = [Trial(MadeUp(name, steady=True), 1, share=share or 0.4, sync_every=every) for name in networks]
    for trial in trials:
        check(trial)
    if not trials and len(gains) > 1:
        raise ConfigError("--tried-on names no network: write for example --tried-on vgg11-narrow")
    return GainTrials(gains, trials)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def trial(
    *,
    recipe: str,
    model: str | None,
    data: str | None,
    epochs: int | None,
    workers: int,
    share: float,
    sync_every: int,
    seed: int,
) -> Trial:
    """The training in which predictors are evaluated, as it was typed.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    images = parsing.path("--data", data)
    if epochs is not None:
        parsing.at_most("--epochs", epochs)
    parsing.at_most("--workers", workers, most=_MOST_WORKERS)
    parsing.at_most("--sync-every", sync_every)
    parsing.seed("--seed", seed)
    made = recipe_of(recipe, model or "", images)
    return Trial(made, made.epochs if epochs is None else epochs, workers, share, sync_every, seed)


def check_evaluate(
    trial: Trial,
    *,
    predictor: str | None,
    records: str | None,
    candidates: str,
    within: float,
    moments: int,
    out: str | None,
) -> EvaluateOptions:
    """Parse and check what was typed, and read the predictor and the records.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    file, recorded = parsing.path("--predictor", predictor), parsing.path("--records", records)
    parsing.at_most("--moments", moments)
    target = parsing.path("--out", out)
    predictors = _predictors(file, parsing.split(candidates))
    check(trial, within, moments)
    held_out = [layer for layer in dataset.load(recorded) if layer.split != "train"] if recorded else []
    if target is not None:
        output(target, "--out")
    return EvaluateOptions(
        trial=trial, predictors=predictors, within=within, moments=moments, held_out=held_out, out=target
    )


def _predictors(file: Path | None, names: Sequence[str]) -> dict[str, Predictor]:
    found: dict[str, Predictor] = {}
    if file is not None:
        found[str(file)] = trained(str(file))
    for name in names:
        if name not in CANDIDATES:
            raise unknown("candidate", name, CANDIDATES)
        found[name] = CANDIDATES[name]()
    if not found:
        raise ConfigError("there is nothing to evaluate: write --predictor FILE, or --candidates mp2,stale")
    return found
