"""The command `tacit run`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.environment import ALGORITHM, FOOTPRINT, HUB, MEMBERS, PROFILE, TENSORBOARD, WORKER, WORKERS
from tacit.files import put, spared, unmake
from tacit_lab.cli.importing import Modules, folder_of, import_own
from tacit_lab.cli.interrupts import interruptible
from tacit_lab.cli.parsing import OUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tacit_lab.cli.run.options import RunOptions
    from tacit_lab.cli.run.result import RunResult
    from tacit_lab.testbed import Testbed
    from tacit_lab.testbed.outputs import OnLine

EPILOG = (
    "The script's own output goes to stdout and stderr, the summary to stderr. MB between nodes is all "
    "that the nodes' interfaces sent from the start of a node's first rank to the end of its last, summed "
    "over the nodes. MB by the formulas is what the sessions of all ranks sent by the formulas of the "
    "collectives, also inside nodes; closing sends parameters and the optimizer's moments whole. MB by the "
    "formulas and compute share are empty if no round was "
    "counted, as with ddp. The exit code is the script's: that of the rank that failed first. It is 2 "
    "if an option is not possible or had no effect, 124 after the time limit, and 130 or 143 after a "
    "signal. An error that several ranks raise is printed once; the traceback of each rank is in the "
    "folder of run.json, in errors."
)
_RANK_COUNTER = Path(__file__).with_name("rank_counter.py")
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_PROFILER = ("-m", "tacit_lab.profiling.script")


def command(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT ARGS",
            help="After --: a script for torchrun, and its arguments, e.g. -- train.py --epochs 3",
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
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="The algorithm that tacit.from_env() returns in the script; by default ddp. The script must "
            "call from_env, or attach this algorithm itself, e.g. topk:ratio=0.01",
            show_default=False,
        ),
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            help="Number of parameter servers, each on a separate node, for ps and the like; with --churn "
            "they are hubs by which the replicas exchange, e.g. 2"
        ),
    ] = 0,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Folder for the checkpoints of the parameter servers, made if needed; a run goes on from "
            "those that it finds there, e.g. servers",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(help="Seconds between two checkpoints of a parameter server, e.g. 10")
    ] = 30,
    modules: Modules = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="Start each worker as a separate world, which goes on if others die, and restart it at "
            "most so many times if it dies; it then takes the servers' parameters. For ps-async and others "
            "whose workers do not wait for each other. "
            f"{WORKER} and {WORKERS} give a script its share of the data, e.g. 1",
            show_default=False,
        ),
    ] = None,
    churn: Annotated[
        str | None,
        typer.Option(
            help="Start each rank as a separate world, and have one killed (kill -9) or frozen every so "
            "often, by a seeded schedule; it is back when the next one goes. The script attaches with "
            f"members=tacit.Members(), which finds the others by {MEMBERS}, or {HUB}; {WORKER} and {WORKERS} "
            "give it its share of the data. For clusters with one rank a node, e.g. 20s",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Time limit for the run in seconds; by default none, e.g. 600", show_default=False),
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
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Print the ranks' processor time by thread and stage, e.g. tacit run --profile -- train.py",
        ),
    ] = False,
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
    from tacit_lab.cli import parsing
    from tacit_lab.cli.run import options as run_options

    import_own(modules, folder_of(script or []))
    options = run_options.check(
        script=script or [],
        cluster=cluster,
        algorithm=algorithm,
        servers=run_options.ServerOptions(
            servers, parsing.path("--checkpoint", checkpoint), checkpoint_every
        ),
        restarts=restarts,
        churn=churn,
        timeout=timeout,
        out=parsing.path("--out", out),
        tensorboard=parsing.path("--tensorboard", tensorboard),
        profile=profile,
    )
    with interruptible():
        result = _run(options)
    typer.echo("\n".join(["", *result.lines(), *_where(options, result)]), err=True)
    if as_json:
        typer.echo(result.to_json())
    raise typer.Exit(result.exit_code or 0)


def _run(options: RunOptions) -> RunResult:
    """Run the script to its end. The result is written into the folder, however the run ends.

    Raises:
        TestbedError: The cluster cannot be emulated.
        Interrupted: A signal came; the testbed is removed.
    """
    from tacit_lab.cli.run import result as results
    from tacit_lab.testbed import Testbed

    _write(options, results.unfinished(options))
    built = False
    try:
        with Testbed(options.cluster) as bed:
            built = True
            result = run_in(bed, options)
    except BaseException as error:
        if built:
            _write(options, results.cut_off(options, error))
        else:
            unmake(options.record, options.footprint, options.folder, OUT)
        raise
    _write(options, result)
    return result


def run_in(
    bed: Testbed,
    options: RunOptions,
    variables: Mapping[str, str] = _NO_VARIABLES,
    on_line: OnLine | None = None,
) -> RunResult:
    """Run the script to its end in a testbed that is up.

    Args:
        variables: What to add to the environment of its ranks.
        on_line: Called with the node and the line of everything that they print; without it that goes to
            this process's stdout and stderr.
    """
    from tacit_lab.cli.run import result as results
    from tacit_lab.profiling import profile
    from tacit_lab.testbed.churn import Churn

    options.footprint.mkdir(exist_ok=True)
    env = {**variables, ALGORITHM: options.algorithm, FOOTPRINT: str(options.footprint)}
    if options.tensorboard is not None:
        env[TENSORBOARD] = str(options.tensorboard)
    if options.profile:
        env[PROFILE] = str(options.footprint)
    churn = None if options.churn is None else Churn(options.churn, 0, partial(_all_have_attached, options))
    profiler = _PROFILER if options.profile else ()
    ended = bed.run(
        [str(_RANK_COUNTER), str(options.footprint), *profiler, *options.script],
        env=env,
        on_line=on_line,
        timeout=options.timeout,
        servers=options.serving,
        restarts=options.restarts,
        churn=churn,
        hold_errors=True,
    )
    profiled = profile.read(options.footprint) if options.profile else []
    return results.summarize(options, ended, profiled, () if churn is None else churn.events)


def _all_have_attached(options: RunOptions) -> bool:
    """Whether each rank has begun to attach, and said so."""
    return len([*options.footprint.glob("rank*.json")]) >= options.cluster.world_size


def _where(options: RunOptions, result: RunResult) -> list[str]:
    """The line that says where the record is; if it could not be written, a note has said so."""
    try:
        whole = options.record.read_text(encoding="utf-8") == result.to_json() + "\n"
    except OSError:
        whole = False
    return [f"Record: {options.record}"] if whole else []


def _write(options: RunOptions, result: RunResult) -> None:
    with spared(f"{options.record} is not written"):
        put(options.record, result.to_json() + "\n")
