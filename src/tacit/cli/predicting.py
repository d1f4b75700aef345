"""What `tacit predictor` does, once its options have been read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer

from tacit.errors import ConfigError, unknown
from tacit.files import output, put
from tacit.lab.predictor_training import dataset, mp2, wnn
from tacit.lab.predictor_training.evaluation import check, judge
from tacit.lab.predictor_training.gain_search import best
from tacit.lab.predictor_training.runs import Sampling, plan, recipe_of
from tacit.lab.predictor_training.runs import record as recorded
from tacit.lab.predictor_training.synthetic import MadeUp
from tacit.lab.predictor_training.trials import Trial, predicting
from tacit.lab.reports import predictors as reports
from tacit.prediction import weight_files
from tacit.prediction.extrapolation import Exponential, Linear, Stale
from tacit.prediction.loading import trained
from tacit.prediction.mp2_network import MP2
from tacit.prediction.predictor import Predictor
from tacit.prediction.wnn_network import WNN

__all__ = ["evaluate", "numbers", "or_none", "record", "train", "words"]

N = TypeVar("N", int, float)
Tell = Callable[[str], None]
NETWORKS = ("mp2", "wnn")
CANDIDATES: dict[str, Callable[[], Predictor]] = {
    "mp2": MP2,
    "wnn": WNN,
    "linear": Linear,
    "exponential": Exponential,
    "stale": Stale,
}


def words(text: str) -> list[str]:
    """A list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def or_none(text: str) -> str | None:
    """What is to be held out; None where nothing is."""
    return None if text == "none" else text


def numbers(option: str, text: str, kind: type[N]) -> list[N]:
    """A list of numbers above or at 0.

    Raises:
        ConfigError: one is none, or below 0, or there are none.
    """
    try:
        found = [kind(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or not all(0 <= each < float("inf") for each in found):
        raise ConfigError(
            f"{option} {text!r} is no list of numbers, 0 or more: write for example {option} 1,2"
        )
    return found


def record(
    *,
    data: Sequence[str],
    models: Sequence[str],
    path: Path | None,
    hold_model: str | None,
    hold_data: str | None,
    rates: Sequence[float],
    seeds: Sequence[int],
    sampling: Mapping[str, Any],
    loop: Path | None,
    out: Path,
    tell: Tell,
) -> None:
    """Train, and write down what elements did."""
    runs = plan(data, models, rates=rates, seeds=seeds, hold_model=hold_model, hold_data=hold_data)
    what = Sampling(**sampling)
    output(out, "--out")
    if loop is not None:
        steps = (what.length or what.rounds) * what.every
        strategy = predicting(trained(str(loop)), share=what.share, sync_every=what.every, steps=steps)
        what = replace(what, algorithm=strategy)
    layers = list(recorded(runs, what, path=path, tell=tell))
    dataset.save(out, layers)
    numbers_ = sum(layer.changes.numel() for layer in layers)
    tell(f"{len(layers)} stretches of layers, {numbers_:,} changes: {out}")


class _Trying(NamedTuple):
    """Which gains are tried, and how."""

    gains: list[float]
    trials: list[Trial]

    @classmethod
    def of(cls, given: Mapping[str, Any], share: float | None) -> _Trying:
        networks = words(given["tried-on"] or "vgg11-narrow")
        gains = numbers("--gains", given["gains"] or "1", float)
        every = 4 if given["sync-every"] is None else given["sync-every"]
        trials = [
            Trial(MadeUp(name, steady=True), 1, share=share or 0.4, sync_every=every) for name in networks
        ]
        for trial in trials:
            check(trial)
        if not trials and len(gains) > 1:
            raise ConfigError("--tried-on names no network: write for example --tried-on vgg11-narrow")
        return cls(gains, trials)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given for name, given in options.items() if given is not None}


def train(
    *,
    records: Sequence[Path],
    network: str,
    of_mp2: Mapping[str, Any],
    of_gains: Mapping[str, Any],
    of_wnn: Mapping[str, Any],
    common: Mapping[str, Any],
    out: Path,
    tell: Tell,
) -> None:
    """Learn from records, and write a predictor's file whose note holds the command."""
    if network not in NETWORKS:
        raise unknown("network", network, NETWORKS)
    own, others = (of_mp2, of_wnn) if network == "mp2" else (of_wnn, {**of_mp2, **of_gains})
    for name, given in others.items():
        if given is not None:
            raise ConfigError(f"--{name} {given} would do nothing for {network}: leave it out")
    told = {**_given(own), **common}
    trying = _Trying.of(of_gains, of_mp2["share"]) if network == "mp2" else None
    output(out, "--out")
    layers = [layer for path in records for layer in dataset.load(path) if layer.split == "train"]
    if not layers:
        raise ConfigError(
            f"everything in {', '.join(map(str, records))} is held out: record runs to learn from, too"
        )
    if trying is None:
        weights = wnn.train(layers, **told, tell=tell)
    else:
        weights = best(mp2.train(layers, **told, tell=tell), trying.gains, trying.trials, tell)
    options = " ".join(f"--{name} {given}" for name, given in (told | _given(of_gains)).items())
    runs = "; ".join(dict.fromkeys(layer.run for layer in layers))
    command = f"tacit predictor train {' '.join(map(str, records))} --network {network} {options}"
    weight_files.write(out, network, weights, f"{command}\nlearnt from: {runs}")
    tell(f"{network} for {', '.join(weights)}: {out}")


def evaluate(
    *,
    predictor: Path | None,
    records: Path | None,
    candidates: Sequence[str],
    recipe: str,
    model: str | None,
    data: Path | None,
    epochs: int | None,
    how: Mapping[str, Any],
    within: float,
    moments: int,
    out: Path | None,
    as_json: bool,
    tell: Tell,
) -> None:
    """Judge, print a table, and write a page."""
    judged = _candidates(predictor, candidates)
    made = recipe_of(recipe, model or "", data)
    trial = Trial(made, made.epochs if epochs is None else epochs, **how)
    check(trial, within, moments)
    held = [layer for layer in dataset.load(records) if layer.split != "train"] if records else []
    if out is not None:
        output(out, "--out")
    told = judge(trial, judged, within=within, moments=moments, held_out=held, tell=tell)
    _show(told, to_stderr=as_json)
    if out is not None:
        put(out, reports.page(told))
        tell(f"Page: {out}")
    if as_json:
        typer.echo(json.dumps(told.to_dict()))


def _candidates(predictor: Path | None, names: Sequence[str]) -> dict[str, Predictor]:
    found: dict[str, Predictor] = {}
    if predictor is not None:
        found[str(predictor)] = trained(str(predictor))
    for name in names:
        if name not in CANDIDATES:
            raise unknown("candidate", name, CANDIDATES)
        found[name] = CANDIDATES[name]()
    if not found:
        raise ConfigError("there is nothing to judge: write --predictor FILE, or --candidates mp2,stale")
    return found


def _show(told: reports.Evaluation, *, to_stderr: bool) -> None:
    from rich.console import Console

    console = Console(stderr=to_stderr)
    console.print()
    console.print(reports.table(told))
