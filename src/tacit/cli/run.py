"""`tacit run`: any torchrun script, unchanged, on an emulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli.interrupts import interruptible
from tacit.files import put, spared

if TYPE_CHECKING:
    from tacit.cli.job import Job
    from tacit.cli.outcome import Outcome

__all__ = ["EPILOG", "command"]

EPILOG = (
    "The script's own output goes to stdout and stderr, the summary to stderr. MB between nodes is all "
    "that the nodes' interfaces sent from the start of a node's first rank to the end of its last, summed "
    "over the nodes. MB by the formulas is what the sessions of all ranks sent by the formulas of the "
    "collectives, also inside nodes; it and compute share are empty where no round was counted, as with "
    "ddp. The exit code is the script's own, that of the rank that failed first; 2 where what was asked "
    "for cannot be, or had no effect; 124 after the time limit; 130 and 143 after a signal. An error that "
    "several ranks raise is printed once; the traceback of each is in the folder of run.json, in errors."
)
_TALLY = Path(__file__).with_name("tally.py")


def command(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT ARGS",
            help="A script as torchrun takes it, and its arguments, behind --, e.g. -- train.py --epochs 3",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="The cluster to emulate, NODESxRANKS@RATE,LATENCY or local:RANKS for plain processes, "
            "e.g. 4x1@1gbit"
        ),
    ] = "2x2@100mbit",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="What tacit.from_env() gives the script; ddp where not given. The script must call it, or "
            "attach that algorithm, e.g. topk:ratio=0.01",
            show_default=False,
        ),
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            help="Parameter servers beside the nodes, each on a node of its own, for ps and its like, e.g. 2"
        ),
    ] = 0,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Folder in which each parameter server keeps its state, made if needed; a run that finds "
            "it there goes on from it, e.g. servers",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(help="Seconds between two saves of a parameter server, e.g. 10")
    ] = 30,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="Each worker is a world of its own, goes on when others die, and is started again so many "
            "times when it does, to take the servers' parameters: for ps-async and its like. "
            "TACIT_WORKER and TACIT_WORKERS tell a script its share of the data, e.g. 1",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which all is ended; by default never, e.g. 600", show_default=False),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for run.json, made if needed, e.g. my-run; by default tacit-out/DATE-TIME-run",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[
        str | None,
        typer.Option(
            help="Folder for TensorBoard: the session's numbers by step, while the script trains, e.g. "
            "curves; then tensorboard --logdir curves",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the summary as one JSON object, the last line on stdout, e.g. | tail -1 | jq",
        ),
    ] = False,
) -> None:
    """Run a training script on an emulated cluster: how long it takes, and what it sends.

    E.g. tacit run --cluster 2x2@100mbit --algorithm topk:ratio=0.01 -- train.py --epochs 3
    """
    from tacit.cli import job, texts

    asked = job.check(
        script=script or [],
        cluster=cluster,
        algorithm=algorithm,
        servers=servers,
        checkpoint=texts.path("--checkpoint", checkpoint),
        checkpoint_every=checkpoint_every,
        restarts=restarts,
        timeout=timeout,
        out=texts.path("--out", out),
        tensorboard=texts.path("--tensorboard", tensorboard),
    )
    with interruptible():
        came = _carry_out(asked)
    typer.echo("\n".join(["", *came.lines(), *_kept(asked, came)]), err=True)
    if as_json:
        typer.echo(came.to_json())
    raise typer.Exit(came.exit_code or 0)


def _carry_out(job: Job) -> Outcome:
    """Run the script to its end; what came of it is on record, whatever came.

    Raises:
        TestbedError: The cluster cannot be emulated.
        Interrupted: A signal came; the testbed is gone.
    """
    from tacit.cli import outcome
    from tacit.cli.job import VARIABLE
    from tacit.lab.testbed import Testbed

    env = {VARIABLE: job.algorithm, "TACIT_FOOTPRINT": str(job.footprint)}
    if job.tensorboard is not None:
        env["TACIT_TENSORBOARD"] = str(job.tensorboard)
    _keep(job, outcome.unfinished(job))
    try:
        with Testbed(job.cluster) as bed:
            argv = [str(_TALLY), str(job.footprint), *job.script]
            result = bed.run(
                argv,
                env=env,
                timeout=job.timeout,
                servers=job.serving,
                restarts=job.restarts,
                hold_errors=True,
            )
    except BaseException as error:
        _keep(job, outcome.cut_off(job, error))
        raise
    came = outcome.judge(job, result)
    _keep(job, came)
    return came


def _kept(job: Job, came: Outcome) -> list[str]:
    """Where the record is; nothing where it could not be written, which has been said."""
    try:
        whole = job.record.read_text(encoding="utf-8") == came.to_json() + "\n"
    except OSError:
        whole = False
    return [f"Record: {job.record}"] if whole else []


def _keep(job: Job, came: Outcome) -> None:
    with spared(f"{job.record} is not written"):
        put(job.record, came.to_json() + "\n")
