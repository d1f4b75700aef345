"""`tacit list`: every algorithm, its parameters and its paper."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tacit_lab.algorithm_facts import MeasuredGap, Parameter

__all__ = ["command"]


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="One algorithm, whose parameters are described, e.g. topk", show_default=False),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a list of JSON objects, e.g. tacit list --json | jq '.[].name'"),
    ] = False,
) -> None:
    """List the algorithms: what each changes, its parameters, its paper, and what it costs in accuracy.

    E.g. tacit list, or tacit list topk
    """
    from tacit import algorithms
    from tacit.errors import unknown

    names = algorithms.known() if name is None else [name]
    if name is not None and name not in algorithms.known():
        raise unknown("algorithm", name, algorithms.known())
    if as_json:
        typer.echo(json.dumps(_objects(names)))
    elif name is not None:
        typer.echo("\n".join(_described(name)))
    else:
        from rich.console import Console

        Console().print(_table())


def _described(name: str) -> list[str]:
    """What one algorithm changes, and its parameters with their defaults and what may stand there."""
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab import algorithm_facts as facts

    entry = ENTRIES[name]
    baseline = f"; a baseline of the survey: take {entry.instead}" if entry.instead else ""
    parameters = [f"  {_format(each)[1:]:28}{each.type}" for each in facts.parameters_of(name)]
    costs = [_cost(gap).replace("[dim]", "").replace("[/dim]", "").split("\n") for gap in facts.gaps_of(name)]
    return [
        f"{name}: {entry.changes}",
        f"{entry.family}; by {facts.collective_of(name)}{baseline}",
        entry.paper,
        *(["", f"Parameters, written {name}:key=value,key=value", *parameters] if parameters else []),
        *(["", "Accuracy, points of plain training's (docs/accuracy.md):"] if costs else []),
        *(f"  {points:16}{where}" for points, where in costs),
    ]


def _objects(names: list[str]) -> list[dict[str, Any]]:
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab import algorithm_facts as facts

    return [
        {
            "name": name,
            **asdict(ENTRIES[name]),
            "collective": facts.collective_of(name),
            "parameters": [asdict(each) for each in facts.parameters_of(name)],
            "accuracy": [asdict(each) for each in facts.gaps_of(name)],
        }
        for name in names
    ]


def _table() -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tacit import algorithms
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab import algorithm_facts as facts

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 1, 0), show_edge=False)
    for heading in ("algorithm", "family: what it changes, and the paper"):
        table.add_column(heading, overflow="fold")
    table.add_column("accuracy, points docs/accuracy.md", width=16, overflow="fold")
    for name in sorted(algorithms.known(), key=lambda name: bool(ENTRIES[name].instead)):
        entry = ENTRIES[name]
        names = "\n".join([f"[bold]{name}[/bold]", *map(_format, facts.parameters_of(name))])
        changes = f"{entry.family}: {entry.changes}; by {facts.collective_of(name)}"
        if entry.instead:
            changes += f"\n[bold]a baseline of the survey: take {entry.instead}[/bold]"
        table.add_row(
            names, f"{changes}\n[dim]{entry.paper}[/dim]", "\n".join(map(_cost, facts.gaps_of(name)))
        )
    return table


def _cost(gap: MeasuredGap) -> str:
    """What it cost; where, at how many bytes; and which parameters it had."""
    width = "" if gap.half is None else f" ± {100 * gap.half:.1f}"
    given = gap.attached.partition(":")[2].replace(",", " ")
    return f"{100 * gap.gap:+.1f}{width}\n[dim]{gap.task}, {gap.bytes:.1%} {given}[/dim]"


def _format(parameter: Parameter) -> str:
    """Such as `ratio=0.01`, as the user types it after the colon."""
    return f" {parameter.name}={'...' if parameter.required else parameter.default}"
