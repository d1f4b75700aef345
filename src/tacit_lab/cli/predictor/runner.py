"""What the commands of `tacit predictor` do, with options that have been checked."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from tacit.files import put
from tacit.prediction.networks import weight_files
from tacit_lab.cli.interrupts import interruptible
from tacit_lab.cli.predictor.options import EvaluateOptions, RecordOptions, ScriptOptions, TrainOptions
from tacit_lab.predictor_training import dataset, mp2, script, wnn
from tacit_lab.predictor_training.evaluation import judge
from tacit_lab.predictor_training.gain_search import best
from tacit_lab.predictor_training.layers import Layer
from tacit_lab.predictor_training.runs import record as recorded
from tacit_lab.reports import predictors as reports

Tell = Callable[[str], None]
"""Prints a line for the user."""


def record(options: RecordOptions, tell: Tell) -> None:
    """Train, and write how elements changed into a file."""
    layers = list(recorded(options.runs, options.sampling, path=options.images, tell=tell))
    dataset.save(options.out, layers)
    _tell_of(layers, options.out, tell)


def record_script(options: ScriptOptions, tell: Tell) -> int:
    """Run a script, and write how elements changed into a file; the script's exit code."""
    with TemporaryDirectory(prefix="tacit-record-") as made, interruptible():
        folder = Path(made)
        variables = script.variables(folder, options.run, options.sampling, options.seed)
        code = _ended(options.command, variables)
        if code:
            tell(f"the script failed with exit code {code}: {options.out} is not written")
            return code
        layers, others = script.collected(folder, options.sampling)
    dataset.save(options.out, layers)
    if others:
        tell(f"{others} more optimizers made steps, which are not recorded: only the first is")
    _tell_of(layers, options.out, tell)
    return 0


def _ended(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """The exit code of a command, which is ended where this one is; 128 + n after signal n."""
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    return code if code >= 0 else 128 - code


def _tell_of(layers: Sequence[Layer], out: Path, tell: Tell) -> None:
    changes = sum(layer.changes.numel() for layer in layers)
    tell(f"{len(layers)} recorded layers, {changes:,} changes: {out}")


def train(options: TrainOptions, tell: Tell) -> None:
    """Train a predictor on records, and write a file; its note holds the command."""
    layers, trials = options.layers, options.gain_trials
    if trials is None:
        weights = wnn.train(layers, **options.arguments, tell=tell)
    else:
        weights = mp2.train(layers, **options.arguments, tell=tell)
        weights = best(weights, trials.gains, trials.trials, tell)
    runs = "; ".join(dict.fromkeys(layer.run for layer in layers))
    weight_files.write(options.out, options.network, weights, f"{options.command}\nlearnt from: {runs}")
    tell(f"{options.network} for {', '.join(weights)}: {options.out}")


def evaluate(options: EvaluateOptions, *, as_json: bool, tell: Tell) -> None:
    """Evaluate predictors, print a table, and write a page."""
    evaluation = judge(
        options.trial,
        options.predictors,
        within=options.within,
        moments=options.moments,
        held_out=options.held_out,
        tell=tell,
    )
    _print_table(evaluation, to_stderr=as_json)
    if options.out is not None:
        put(options.out, reports.page(evaluation))
        tell(f"Page: {options.out}")
    if as_json:
        typer.echo(json.dumps(evaluation.to_dict()))


def _print_table(evaluation: reports.Evaluation, *, to_stderr: bool) -> None:
    from rich.console import Console

    console = Console(stderr=to_stderr)
    console.print()
    console.print(reports.table(evaluation))
