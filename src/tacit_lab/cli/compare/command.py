"""The command `tacit compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.errors import ConfigError, TestbedError
from tacit_lab.cli import report
from tacit_lab.cli.importing import Modules, folder_of, import_own
from tacit_lab.cli.interrupts import Interrupted, interruptible
from tacit_lab.reports import MEANINGS

if TYPE_CHECKING:
    from rich.console import Console

    from tacit_lab.cli.compare.recorder import ComparisonRecorder
    from tacit_lab.reports import Comparison

ALGORITHMS = "ddp,bf16,powersgd,topk,lowbit,auto"
OF_MEMBERS = "lowbit,diloco,dense"
EPILOG = "The columns, of a recipe. " + " ".join(f"{name}: {meaning}." for name, meaning in MEANINGS.items())


def command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE | -- SCRIPT ARGS",
            help="What to train: digits (the default), bytes, cifar10, gpt, lora, mnist or "
            "recommender; or after -- a script for torchrun that calls tacit.from_env and "
            "tacit.report, e.g. -- train.py --epochs 3",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="The cluster to emulate, NODESxRANKS@RATE,LATENCY or local:RANKS for plain processes, "
            "e.g. 4x1@1gbit,20ms, or with jitter and loss 4x1@100mbit,30ms±2ms,1%loss"
        ),
    ] = "2x2@100mbit",
    algorithms: Annotated[
        str,
        typer.Option(
            help="What to compare, separated by commas; parameters follow a colon, "
            "e.g. ddp,topk:ratio=0.01,localsgd:sync_every=8"
        ),
    ] = ALGORITHMS,
    servers: Annotated[
        int,
        typer.Option(
            help="Number of parameter servers, each on a separate node, for ps and the like; with --churn "
            "they are hubs by which the replicas exchange, e.g. 1"
        ),
    ] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help="The network for cifar10 (by default resnet20), mnist (lenet) or digits (its own), "
            "e.g. resnet8",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder or archive with the images of cifar10 or mnist, e.g. cifar-10-binary.tar.gz",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download",
            help="Download the images from their authors, check them and cache them, "
            "e.g. tacit compare mnist --download",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Train only on so many first images of cifar10 or mnist, e.g. 10000",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Type in which the network for cifar10 or mnist computes: fp32, or bf16 if the CPU has "
            "instructions for it, e.g. bf16",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs to train; by default the recipe's, e.g. 3")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy to reach, 0..1; by default the recipe's, of a script none, e.g. 0.9"),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            help="Seeds of the initial weights and the order of the data: each algorithm is trained with "
            "each, and compared seed by seed. A script asks tacit.trial() for its seed, e.g. 0..4, or 0,3"
        ),
    ] = "0",
    rates: Annotated[
        str,
        typer.Option(
            help="What the learning rate is multiplied by: of several, each algorithm is trained with the "
            "one that is best on validation. A script asks tacit.trial() for it, e.g. 0.5,1,2"
        ),
    ] = "1",
    replicas: Annotated[
        str,
        typer.Option(
            metavar="processes|in-process",
            help="in-process trains all ranks of a recipe in one process, without a network: many times "
            "faster, for accuracy alone; nothing is known of seconds, and bytes are counted by formulas, "
            "e.g. in-process",
        ),
    ] = "processes",
    churn: Annotated[
        str | None,
        typer.Option(
            help="How often a replica is killed (kill -9) or frozen, by a seeded schedule; when the next one "
            "goes, it is started again, or goes on. For algorithms that members can "
            "have, such as lowbit, diloco and dense, with one rank a node. With the --out of a comparison "
            "without it, whose rates it takes, the table has the goodput, e.g. 20s",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one algorithm may take, launch included, e.g. 600")
    ] = 3600,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for the records, made if needed; a comparison that was interrupted there goes on, "
            "e.g. my-run; by default tacit-out/DATE-TIME-RECIPE",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[
        str | None,
        typer.Option(
            help="Folder for TensorBoard, with a run for each algorithm: loss, accuracy and the session's "
            "numbers by step, e.g. curves; then tensorboard --logdir curves",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object on stdout, e.g. tacit compare --json | jq .rows"),
    ] = False,
    modules: Modules = None,
) -> None:
    """Train a recipe or a script with several algorithms on an emulated cluster, and compare them.

    By time, bytes and accuracy. Every algorithm starts from the same weights and sees the same data in the
    same order. E.g.
    tacit compare digits --cluster 2x2@100mbit --algorithms ddp,topk:ratio=0.01
    """
    from rich.console import Console

    from tacit_lab import reports
    from tacit_lab.cli import parsing
    from tacit_lab.cli.compare import options as compare_options
    from tacit_lab.cli.compare import runner
    from tacit_lab.cli.compare.display import open_display
    from tacit_lab.cli.compare.recorder import ComparisonRecorder
    from tacit_lab.recipes import Choices
    from tacit_lab.records import CHOOSING

    words = what or ["digits"]
    if replicas == compare_options.IN_PROCESS and algorithms == ALGORITHMS:
        algorithms = ALGORITHMS.removesuffix(",auto")  # which needs a network
    if churn is not None and algorithms == ALGORITHMS:
        algorithms = OF_MEMBERS
    import_own(modules, folder_of(words))
    options = compare_options.check(
        what=words,
        cluster=parsing.cluster(cluster, servers),
        algorithms=algorithms,
        epochs=epochs,
        target=target,
        seeds=seeds,
        rates=rates,
        timeout=timeout,
        out=parsing.path("--out", out),
        replicas=replicas,
        churn=churn,
        choices=Choices(model=model, data=parsing.path("--data", data), limit=limit, precision=precision),
    )
    curves = parsing.path("--tensorboard", tensorboard)
    options = compare_options.prepared(options, curves, download, lambda text: typer.echo(text, err=True))
    screen, recorder = Console(stderr=True), ComparisonRecorder(options)
    with interruptible():
        try:
            with open_display(screen, runner.planned(options, recorder)) as display:
                runner.train_all(options, display, recorder)
        except BaseException as error:
            # Trainings that had ended are worth a report.
            ended = any(end.status == "ok" and key.seed != CHOOSING for key, end in recorder.ends.items())
            if isinstance(error, (TestbedError, Interrupted)) and ended:
                _print_summary(reports.compare(recorder.records), recorder, options.records, screen)
            elif recorder.records:
                _print_text(screen, _write_report(options.records))
            raise
    comparison = reports.compare(recorder.records)
    _print_summary(comparison, recorder, options.records, screen if as_json else Console())
    if as_json:
        typer.echo(json.dumps(comparison.to_dict()))


def _print_summary(
    comparison: Comparison, recorder: ComparisonRecorder, records: Path, console: Console
) -> None:
    from tacit_lab import reports

    console.print()
    console.print(reports.table(comparison))
    for doubt in reports.doubts(recorder.records):
        _print_text(console, f"\nNote: {doubt}")
    _print_text(console, f"\nRecords: {records}\n{_write_report(records)}")


def _print_text(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _write_report(records: Path) -> str:
    """Write the page and the traces next to the records. Returns their paths, or why they are not there."""
    try:
        return "\n".join(report.write(records, records.with_name(report.PAGE)))
    except ConfigError as error:
        return f"Report: none, {error}"
