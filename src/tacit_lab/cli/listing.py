"""`tacit list`: a line for every algorithm; of one, its parameters, its paper and what it costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit_lab.cli.importing import Modules, import_own

if TYPE_CHECKING:
    from rich.table import Table

    from tacit_lab.algorithm_facts import MeasuredGap, Parameter


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="One algorithm, whose parameters are described, e.g. topk", show_default=False),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Only the algorithms of one family, e.g. sparsification")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a list of JSON objects, e.g. tacit list --json | jq '.[].name'"),
    ] = False,
    modules: Modules = None,
) -> None:
    """List the algorithms by what they change, or describe one: its parameters, its paper, what it costs.

    E.g. tacit list, or tacit list topk
    """
    from tacit import algorithms
    from tacit.algorithms.registry import canonical
    from tacit.errors import ConfigError, unknown
    from tacit_lab.algorithm_facts import by_family

    import_own(modules)
    families = by_family()
    if name is not None and family is not None:
        raise ConfigError(f"{name} and --family {family} are two questions: leave one of them out")
    if family is not None and family not in families:
        raise unknown("family", family, families)
    if family is not None:
        families = {family: families[family]}
    name = None if name is None else canonical(name)
    if name is not None and name not in algorithms.known():
        raise unknown("algorithm", name, algorithms.known())
    shown = {each for names in families.values() for each in names}
    names = [each for each in algorithms.known() if each in shown] if name is None else [name]
    if as_json:
        typer.echo(json.dumps(_objects(names)))
    elif name is not None:
        typer.echo("\n".join(_described(name)))
    else:
        from rich.console import Console

        Console().print(_table(families))


def _described(name: str) -> list[str]:
    """What one algorithm changes; its parameters: default, meaning, what may stand there."""
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab import algorithm_facts as facts

    entry = ENTRIES[name]
    baseline = f"; a baseline of the survey: take {entry.instead}" if entry.instead else ""
    parameters = [f"  {_format(each):27} {_told(each)}" for each in facts.parameters_of(name)]
    costs = [*map(_cost, sorted(facts.gaps_of(name), key=lambda gap: (gap.task, -gap.steps)))]
    return [
        f"{name}: {entry.changes}",
        *([] if facts.is_ours(name) or not facts.summary_of(name) else [facts.summary_of(name)]),
        f"{entry.family}; by {facts.collective_of(name)}{baseline}",
        entry.paper,
        *(["", f"Parameters, written {name}:key=value,key=value", *parameters] if parameters else []),
        *(["", "Accuracy, points of plain training's (docs/accuracy.md):"] if costs else []),
        *costs,
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


def _table(families: Mapping[str, Sequence[str]]) -> Table:
    """A line for each algorithm, by family: what it changes, and what it costs as it is by its name alone."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tacit.algorithms import ALGORITHMS, parse
    from tacit.algorithms.registry import ENTRIES
    from tacit_lab import algorithm_facts as facts

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("algorithm", no_wrap=True)
    table.add_column("what it changes", overflow="fold")
    table.add_column("accuracy, points", no_wrap=True)  # of which training, after how many steps
    for family, names in families.items():
        table.add_row(f"[bold]{family}[/bold]", "", "")
        first = next((name for name in names if ENTRIES[name].instead), None)
        for name in names:
            entry = ENTRIES[name]
            if name == first:
                table.add_row("  [italic]baselines[/italic]", "of the survey, to be compared with:", "")
            baseline = f" (take {entry.instead})" if entry.instead else ""
            by_name = [
                gap
                for gap in facts.gaps_of(name)
                if gap.attached == name or parse(gap.attached) == ALGORITHMS[name]()
            ]
            cost = f"{_points(by_name[0])} {by_name[0].task}, {by_name[0].steps:,}" if by_name else ""
            table.add_row(f"  {name}", entry.changes + baseline, cost)
    table.caption = (
        "accuracy: points of plain training's, the training, its steps (compare those of equal steps alone); "
        "blank: not measured as it is by default. tacit list NAME: its parameters, its paper, all that was "
        "measured of it"
    )
    return table


def _points(gap: MeasuredGap) -> str:
    width = "" if gap.half is None else f" ± {100 * gap.half:.2f}"
    return f"{100 * gap.gap:+.2f}{width}"


def _cost(gap: MeasuredGap) -> str:
    """What it cost; where, after how many steps, at how many bytes; and which parameters it had."""
    where = f"{gap.task}, {gap.steps:,} steps".ljust(22)
    return f"  {_points(gap):16}{where}{gap.bytes:6.1%} of the bytes  {gap.attached}"


def _told(parameter: Parameter) -> str:
    return f"{parameter.meaning} ({parameter.type})" if parameter.meaning else parameter.type


def _format(parameter: Parameter) -> str:
    """Such as `ratio=0.01`, as the user types it after the colon."""
    default = parameter.default
    if isinstance(default, float) and len(str(default)) > 8:
        default = f"{default:.4g}"
    return f"{parameter.name}={'...' if parameter.required else default}"
