"""`tacit list`: every algorithm, its parameters and its paper."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tacit.algorithms.measured import MeasuredGap
    from tacit.algorithms.registry import Parameter

__all__ = ["command"]


def command(
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a list of JSON objects, e.g. tacit list --json | jq '.[].name'"),
    ] = False,
) -> None:
    """List the algorithms: what each changes, its parameters, its paper, and what it costs in accuracy.

    E.g. tacit list
    """
    if as_json:
        typer.echo(json.dumps(_objects(), ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(_table())


def _objects() -> list[dict[str, Any]]:
    from tacit import algorithms
    from tacit.algorithms import registry
    from tacit.algorithms.measured import gaps_of

    return [
        {
            "name": name,
            **asdict(registry.ENTRIES[name]),
            "collective": registry.collective_of(name),
            "parameters": [asdict(each) for each in registry.parameters_of(name)],
            "accuracy": [asdict(each) for each in gaps_of(name)],
        }
        for name in algorithms.known()
    ]


def _table() -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tacit import algorithms
    from tacit.algorithms import registry
    from tacit.algorithms.measured import gaps_of

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 1, 0), show_edge=False)
    costs = "points of accuracy against plain training, as docs/accuracy.md has them"
    for heading in ("algorithm", "family", "what it changes, and the paper", costs):
        table.add_column(heading, overflow="fold")
    for name in algorithms.known():
        entry = registry.ENTRIES[name]
        names = "\n".join([f"[bold]{name}[/bold]", *map(_format, registry.parameters_of(name))])
        changes = f"{entry.changes}; by {registry.collective_of(name)}"
        lost = "\n".join(map(_cost, gaps_of(name)))
        table.add_row(names, entry.family, f"{changes}\n[dim]{entry.paper}[/dim]", lost)
    return table


def _cost(gap: MeasuredGap) -> str:
    """What was attached, and below it what it cost."""
    return f"{gap.attached}\n  {gap}"


def _format(parameter: Parameter) -> str:
    """Such as `ratio=0.01`, as the user types it after the colon."""
    return f" {parameter.name}={'...' if parameter.required else parameter.default}"
