"""The command `tacit study`."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.errors import ConfigError, TestbedError
from tacit_lab.cli import parsing
from tacit_lab.cli.importing import Modules, folder_of, import_own
from tacit_lab.cli.interrupts import interruptible
from tacit_lab.cli.report import RUNS, STUDY, STUDY_PAGE

if TYPE_CHECKING:
    from tacit.strategy import AnyStrategy
    from tacit_lab.recipes import Choices
    from tacit_lab.study.jobs import Ended, StudyRun

PLAIN = "dense"
CLUSTER = "4x1@100mbit"


def command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE | -- SCRIPT ARGS",
            help="What to train: a recipe, by default digits; or after -- a script, on an emulated cluster, "
            "that asks tacit.trial() for seed, rate and steps, and calls tacit.report, e.g. -- train.py",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Lengths of training, in steps: each is a study of its own, e.g. 100,200,400")
    ] = "100,200",
    algorithms: Annotated[
        str,
        typer.Option(
            help="What to compare with plain training (dense), which is always among them, e.g. "
            "topk:ratio=0.01,lowbit"
        ),
    ] = "dense,topk,lowbit",
    seeds: Annotated[str, typer.Option(help="Seeds over which gaps are paired, e.g. 0..4")] = "0..2",
    rates: Annotated[
        str,
        typer.Option(
            help="What the learning rate is multiplied by, to choose from for each algorithm; a single one "
            "is taken as it is, e.g. 0.5,1,2"
        ),
    ] = "0.5,1,2",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Choose no learning rates: a first look, e.g. tacit study digits --quick"
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The network, for recipes that leave it open, e.g. resnet8", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder or archive with images, as of compare, e.g. cifar-10-binary.tar.gz",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Train on so many first images; 2,000 behind them choose learning rates, e.g. 48000",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16, as of compare, e.g. bf16", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="The cluster on which a script is trained, by default 4x1@100mbit, e.g. 2x2@1gbit",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one training of a script may take, e.g. 600")
    ] = 3600,
    jobs: Annotated[
        int, typer.Option(help="Trainings of a recipe at once; by default a core each, e.g. 2")
    ] = 0,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no training after so many, e.g. 60", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the trainings and the page, made if needed; what is there is not trained again, "
            "e.g. my-study; by default tacit-out/DATE-TIME-study",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object on stdout, e.g. tacit study --json | jq .rows"),
    ] = False,
    modules: Modules = None,
) -> None:
    """Find out what algorithms cost in accuracy: the gap to plain training, against steps and bytes.

    Four workers train a recipe in one process and exchange what tacit sends, without a network, which is many
    times faster than `tacit compare`, and says nothing of time; a script is trained on an emulated cluster.
    Each algorithm has the best of several learning rates, chosen with a seed that is in no gap. E.g.
    tacit study digits --steps 100,200 --algorithms topk,lowbit
    """
    from tacit.files import put
    from tacit_lab import recipes
    from tacit_lab.cli.compare.options import rates_of, refuse_choices, script_of, seeds_of
    from tacit_lab.cli.study_scripts import StudiedScript
    from tacit_lab.reports.summary import TWO_SEEDS
    from tacit_lab.study import page as report
    from tacit_lab.study.carrying_out import carry_out
    from tacit_lab.study.jobs import read
    from tacit_lab.study.replicas import refuse
    from tacit_lab.study.search import Rule, Study, table
    from tacit_lab.study.training import WORKERS

    words = what or ["digits"]
    import_own(modules, folder_of(words))
    script, name = script_of(words), " ".join(words)
    choices = recipes.Choices(
        model=model, data=parsing.path("--data", data), limit=limit, precision=precision
    )
    lengths = sorted({parsing.whole("--steps", each, 2) for each in parsing.numbers("--steps", steps, int)})
    factors, numbers = rates_of("1" if quick else rates), seeds_of(seeds)
    at_once = parsing.whole("--jobs", jobs or len(os.sched_getaffinity(0)))
    most = math.inf if minutes is None else parsing.seconds("--minutes", minutes, 60)
    on = parsing.cluster(cluster or CLUSTER, 0)
    seconds = parsing.seconds("--timeout", timeout, 600)
    validation = 0
    if script:
        refuse_choices(choices, None)
        arms = _arms(algorithms)
    else:
        if cluster is not None:
            raise ConfigError(f"--cluster {cluster} is for scripts: a recipe is trained in one process")
        recipe, arms = recipes.get(name, choices), _arms(algorithms, refuse)
        recipe.prepare(_tell)
        if not recipe.steps_per_epoch(WORKERS):
            raise ConfigError(f"{name} has too little data for {WORKERS} workers: give it more")
        validation = recipe.validation
    # Rates of every length are searched, as none of them is known to be long.
    rule = Rule(searched=lengths[-1], longest=lengths[-1], validation=validation)
    study = Study({name: rule}, PLAIN, factors)
    wanted = [(name, arm, each) for each in lengths for arm in arms]
    folder = parsing.made("--out", parsing.out(parsing.path("--out", out), "study"))
    path = folder / RUNS

    def missing(done: Mapping[StudyRun, Ended]) -> Iterator[StudyRun]:
        return study.missing(done, wanted, numbers)

    with interruptible():
        if script:
            done = StudiedScript(script, on, seconds, folder).carry_out(missing, read(path), path, _tell)
        else:
            train = partial(_train, choices)
            done = carry_out(missing, train, read(path), path, jobs=at_once, minutes=most, tell=_tell)
    rows = study.rows(done, wanted, numbers)
    called = shlex.join(["tacit", *sys.argv[1:]])
    result = {
        "task": name,
        "plain": PLAIN,
        "seeds": numbers,
        "rates": factors,
        "rows": rows,
        "command": called,
    }
    try:
        put(folder / STUDY, json.dumps(result) + "\n")
        put(folder / STUDY_PAGE, report.page(f"{name}: gaps to {PLAIN}", rows, PLAIN))
        where = str(folder / STUDY_PAGE)
    except ConfigError as error:
        where = f"none, {error}"
    meanings = {
        **report.COLUMNS,
        "accuracy": "held out, 0..1, the mean over the seeds; of a script without one minus its loss",
    }
    legend = [f"{name}: {meanings[name]}" for name in ("rate", "bytes", "accuracy", "gap")]
    notes = ["", f"Note: {TWO_SEEDS}"] if len(numbers) == 2 else []
    ends = ["", f"Trainings: {path}", f"Page: {where}"]
    typer.echo("\n".join(["", table(rows), "", *legend, *notes, *ends]), err=as_json)
    if as_json:
        typer.echo(json.dumps(result))
    there = {(row["arm"], row["steps"]) for row in rows}
    if lacking := [f"{arm} of {each} steps" for _, arm, each in wanted if (arm, each) not in there]:
        raise TestbedError(
            f"nothing came of {', '.join(lacking)}: its lines above say why, or --minutes were over"
        )


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _arms(text: str, refuse: Callable[[AnyStrategy], None] = lambda strategy: None) -> Sequence[str]:
    """Plain training, and the algorithms of a list, but for what `refuse` does not take."""
    from tacit.algorithms import parse
    from tacit.attaching.requirements import needs_servers

    arms = list(dict.fromkeys([PLAIN, *parsing.split_algorithms(text)]))
    for arm in arms:
        strategy = parse(arm)
        refuse(strategy)
        if needs_servers(strategy) or arm == "ddp":
            raise ConfigError(
                f"{arm} cannot be in a study: leave it out, or use tacit compare ({PLAIN} computes what ddp "
                "does)"
            )
    return arms


def _train(choices: Choices, run: StudyRun) -> Ended:
    """Train one, in a process of its own."""
    from tacit_lab import recipes
    from tacit_lab.study.training import train

    return train(run, recipes.get(run.task, choices))
