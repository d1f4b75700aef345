"""The rows of `benchmarks/peers.py`, summed up over its seeds and written as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markdown_tables import markdown

Row = Mapping[str, Any]

_HEAD = (
    "",
    "",
    "seconds",
    "to {target:.0%}",
    "accuracy",
    "MB a node",
    "MB memory",
    "apart",
    "ours, of theirs",
)


def to_target(row: Row, target: float) -> float | None:
    """Seconds of training until the accuracy was first reached; None where it never was."""
    reached = [each["seconds"] for each in row["evaluations"] if each["accuracy"] >= target]
    return min(reached, default=None)


def table(result: Mapping[str, Any]) -> str:
    """What a run has found: a paragraph on where, a table, and what failed with which words."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault((row["peer"], row["side"]), []).append(row)
    head = [each.format(target=result["target"]) for each in _HEAD]
    cells = []
    for (peer, side), rows in groups.items():
        theirs = groups.get((peer, "peer"), []) if side == "tacit" else []
        cells.append(_cells(rows, theirs, result["target"]))
    failed = [f"* {text}" for rows in groups.values() for text in _failures(rows)]
    lines = [*_where(result), "", markdown(head, cells)]
    return "\n".join([*lines, *(["", "What failed, with its last words:", "", *failed] if failed else [])])


def _where(result: Mapping[str, Any]) -> list[str]:
    hardware = result["hardware"]
    seeds = sorted({row["seed"] for row in result["rows"]})
    return [
        f"{hardware['date']}, {hardware['cpu']}, {hardware['cores']} cores, Python {hardware['python']}, "
        f"torch {hardware['torch']}, tacit at {hardware['commit']}. "
        f"The recipe `digits` on `{result['cluster']}`, {result['steps']} steps, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}.",
        *_others(result["rows"]),
    ]


def _others(rows: Sequence[Row]) -> list[str]:
    told = {
        "busy": "Just before each run, other work kept the cores busy to {}.",
        "withheld": "Of their time in each run a hypervisor withheld {}.",
    }
    return [
        text.format(_spread(found))
        for key, text in told.items()
        if (found := [row[key] for row in rows if key in row])
    ]


def _spread(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%} (median; {min(shares):.0%} to {max(shares):.0%})"


def _cells(rows: Sequence[Row], theirs: Sequence[Row], target: float) -> list[str]:
    well = [row for row in rows if row["status"] == "ok"]
    names = [rows[0]["who"], rows[0]["does"]]
    if not well:
        return [*names, "failed", *[""] * 6]
    times = [to_target(row, target) for row in well]
    reached = [each for each in times if each is not None]
    few = "" if len(reached) == len(rows) else f" ({len(reached)} of {len(rows)})"
    return [
        *names,
        _figure(well, lambda row: row["seconds"], "{:.1f}") + _count(well, rows),
        f"{statistics.median(reached):.1f}{few}" if reached else "not reached",
        f"{statistics.mean(row['evaluations'][-1]['accuracy'] for row in well):.3f}",
        _figure(well, lambda row: row["mb_per_node"], "{:.1f}"),
        f"{max(row['peak_mb'] for row in well):.0f}",
        f"{max(row['apart'] for row in well):.1g}",
        _share(well, theirs),
    ]


def _count(well: Sequence[Row], rows: Sequence[Row]) -> str:
    return "" if len(well) == len(rows) else f" ({len(well)} of {len(rows)})"


def _figure(rows: Sequence[Row], of: Callable[[Row], float | None], form: str) -> str:
    values = [value for row in rows if (value := of(row)) is not None]
    return form.format(statistics.median(values)) if values else ""


def _share(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """Our seconds over theirs: the median over the seeds, each pair measured one after the other."""
    by_seed = {row["seed"]: row["seconds"] for row in theirs if row["status"] == "ok"}
    ratios = [row["seconds"] / by_seed[row["seed"]] for row in ours if row["seed"] in by_seed]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _failures(rows: Sequence[Row]) -> list[str]:
    """Each message once."""
    found: dict[str, int] = {}
    for row in rows:
        if row["status"] != "ok":
            found[row["message"]] = found.get(row["message"], 0) + 1
    first = rows[0]
    return [
        f"{first['who']}, {first['does']}"
        + (f", {times} of {len(rows)} runs" if times < len(rows) else "")
        + f": `{message.replace('`', chr(39))}`"
        for message, times in found.items()
    ]
