"""`tacit diagnose`: where the time of a training script's steps goes, on an emulated cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from tacit.errors import ConfigError
from tacit.files import output
from tacit_lab.cli import parsing
from tacit_lab.cli.importing import Modules, folder_of, import_own
from tacit_lab.cli.interrupts import interruptible


def command(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT ARGS",
            help="After --: a script for torchrun, with tacit or without, and arguments, e.g. -- train.py",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="The cluster to emulate, NODESxRANKS@RATE,LATENCY or local:RANKS, by default 2x2@100mbit; "
            "with --profile the one to predict, e.g. 4x1@100mbit",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="The algorithm that tacit.from_env() returns in the script, e.g. topk:ratio=0.01",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Train nothing, and diagnose the steps that a saved profile predicts for the cluster, of "
            "ddp or of --algorithm, e.g. profile.json",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="How many steps are measured; by default 20, or two periods, e.g. 50", show_default=False
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Where to save it, as JSON, e.g. diagnosis.json", metavar="FILE", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print it as one line of JSON, e.g. tacit diagnose --json -- train.py | jq"
        ),
    ] = False,
    modules: Modules = None,
) -> None:
    """Find out where the time of a script's steps goes, and what would change it. It ends after them.

    On real machines: torchrun ... -m tacit.diagnose train.py. E.g. tacit diagnose -- train.py
    """
    from tacit_lab import diagnoses

    import_own(modules, folder_of(script or []))
    profiled = parsing.path("--profile", profile)
    if bool(script) == (profiled is not None):
        raise ConfigError(
            "say what is diagnosed, by one of the two: a script after --, such as tacit diagnose -- "
            "train.py, or a profile that tacit profile has saved, such as tacit diagnose --profile "
            "profile.json"
        )
    if profiled is not None and cluster is None:
        sizes = diagnoses.sizes(profiled)
        raise ConfigError(
            f"say for which cluster, such as --cluster {sizes[-1] if sizes else '4x1'}@10gbit: the profile "
            f"has costs for {', '.join(sizes) or 'none yet'}"
        )
    shape = parsing.cluster(cluster or "2x2@100mbit", 0, planned=profiled is not None)
    saved = parsing.path("--out", out)
    if saved is not None:
        output(saved, "--out")
    if steps is not None and steps < 2:
        raise ConfigError(f"--steps {steps} is not possible: write 2 or more, such as 20")
    text = None if algorithm is None else parsing.split_algorithms(algorithm)[0]
    if profiled is not None:
        found = diagnoses.of_profile(profiled, shape, text or "ddp")
    else:
        typer.echo(
            f"Training on {shape}: some steps first, then {steps or 'about 20'} that are timed, then links",
            err=True,
        )
        with interruptible():
            found = diagnoses.of_script(
                shape,
                script or [],
                text,
                steps or 0,
                lambda node, line: typer.echo(f"node {node}: {line}", err=True),
            )
    typer.echo(found.to_json().strip() if as_json else str(found))
    if saved is not None:
        found.save(saved)
        typer.echo(f"Diagnosis: {saved}", err=as_json)
