"""`tacit profile`: what a training computes in a step, and what strategies cost on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tacit.errors import ConfigError
from tacit.files import output
from tacit_lab.cli import parsing
from tacit_lab.cli.importing import Modules, folder_of, import_own
from tacit_lab.cli.interrupts import interruptible

if TYPE_CHECKING:
    from tacit.planning.profile import GpuProfile, Profile


def command(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT ARGS",
            help="After --: a script for torchrun that attaches tacit, and its arguments, e.g. -- train.py",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(help="On which emulated cluster it is profiled, e.g. local:4 or 4x1@1gbit"),
    ] = "local:2",
    algorithms: Annotated[
        str,
        typer.Option(help="The algorithms whose cost is measured, with commas, e.g. topk,powersgd"),
    ] = "",
    layout: Annotated[
        str,
        typer.Option(help="The clusters for which it is measured, NODESxRANKS, with commas, e.g. 4x1,8x1"),
    ] = "4x1,8x1",
    out: Annotated[
        str,
        typer.Option(
            help="Where to save it; a file that is there is replaced, e.g. profile.json", metavar="FILE"
        ),
    ] = "profile.json",
    modules: Modules = None,
) -> None:
    """Profile the first steps of a training script, for tacit plan. The script ends after them.

    On real machines: set TACIT_STEP_PROFILE=profile.json, and start the script as always; it trains on.
    E.g. tacit profile --cluster local:2 -- train.py
    """
    from tacit_lab import step_profiles
    from tacit_lab.cluster import Cluster
    from tacit_lab.cluster_plans import CANDIDATES, FOR_ADAM
    from tacit_lab.testbed import Testbed

    import_own(modules, folder_of(script or []))
    if not script:
        raise ConfigError("there is no script: write it after --, such as tacit profile -- train.py")
    shape = parsing.cluster(cluster, 0)
    saved = parsing.path("--out", out)
    assert saved is not None
    output(saved, "--out")
    texts = parsing.split_algorithms(algorithms) if algorithms else [*CANDIDATES, *FOR_ADAM]
    layouts = [
        (each.nodes, each.ranks_per_node) for each in map(Cluster.parse, parsing.split(layout) or ["4x1"])
    ]
    with interruptible(), Testbed(shape) as bed:
        profile = step_profiles.of_script(bed, script, texts, layouts, asked=bool(algorithms))
    profile.save(saved)
    typer.echo(_told(profile))
    typer.echo(f"Profile: {saved}")


def _told_of_gpu(gpu: GpuProfile) -> list[str]:
    links = gpu.links
    lines = [
        f"{gpu.name}; the host launches a step in {1e3 * gpu.launching.seconds:.1f} ms; copies to the host "
        f"{gpu.down / 1e9:.1f} GB/s, back {gpu.up / 1e9:.1f}"
    ]
    for where, rate, latency in (
        ("inside a node", links.near_rate, links.near_latency),
        ("between nodes", links.rate, links.latency),
    ):
        if rate:
            lines.append(f"NCCL's rings {where}: {rate / 1e9:.2f} GB/s, {1e6 * latency:.0f} us a message")
    return lines


def _told(profile: Profile) -> str:
    from tacit.planning.diagnosis import ACCUMULATING

    step = profile.step
    data = [("data", step.data - step.loading), ("waiting for the loader", step.loading)]
    parts = (
        *([(ACCUMULATING, step.data)] if step.passes > 1 else data),
        ("forward", step.forward),
        ("backward", step.backward),
        ("optimizer", step.optimizer),
    )
    lines = [f"A step of a rank, ms: {1e3 * step.seconds:.1f}"]
    lines += [f"  {name:32}{1e3 * seconds:10.1f}" for name, seconds in parts if seconds]
    lines += [
        f"{profile.model_bytes / 1e6:.1f} MB of parameters; {profile.ranks} ranks on {profile.cores} cores, "
        f"{profile.threads} threads each; {profile.processor}",
        f"Gloo takes {1e9 * profile.per_byte:.2f} ns of a processor for each byte, and "
        f"{1e6 * profile.per_message:.0f} us for each message.",
    ]
    if profile.shards > 1:
        lines.append(
            f"{profile.shards} ranks share a replica (FSDP2): tacit plan and tacit diagnose refuse it."
        )
    if profile.gpu is not None:
        lines += _told_of_gpu(profile.gpu)
    for cost in profile.costs:
        buckets = [each for level in cost.levels for each in level.buckets]
        spent = sum(sum(each.segments) for each in buckets)
        launching = sum(each.launching for each in buckets)
        main = sum(level.main for level in cost.levels)
        lines.append(
            f"  {cost.algorithm:24}{1e3 * spent:10.1f} ms to encode and decode a round, "
            f"{f'{1e3 * launching:.1f} ms of the host to launch it, ' if launching else ''}"
            f"{1e3 * main:.1f} ms to read and apply, on {cost.nodes}x{cost.ranks}"
        )
    return "\n".join(lines)
