"""What scaling.py has measured, and what the planner's clock foretells beside it, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_tables import fill, markdown
from paired import RESULTS, ROOT
from runs import COMPUTE_ONLY

PAGE = ROOT / "docs" / "scaling.md"
TITLES = {
    "flat": "One rank a node",
    "nodes": "Nodes of several ranks",
    "server": "A parameter server",
}
COUNTS = ("packets", "cpu_ms", "sockets", "threads", "resident_mb")
"""What rows have beside seconds and bytes."""
_SHOWN = {
    "step_ms": ("Milliseconds a step", "{:.0f}"),
    "mb_per_rank": ("MB that a rank sends in a step", "{:.3f}"),
    "packets": ("TCP packets that a rank sends in a step", "{:.0f}"),
    "cpu_ms": ("Milliseconds of processor time of a rank in a step", "{:.1f}"),
    "sockets": ("Sockets that a rank opens", "{:.0f}"),
    "threads": ("Threads that a rank opens", "{:.0f}"),
}


def newest() -> list[Path]:
    """The last measurement of times; and, if that has no counts, or there is a later one of them, that."""
    times, counts = (sorted(RESULTS.glob(f"*-{name}.json"))[-1:] for name in ("scaling", "scaling-counts"))
    if counts and times and times[0].name[:10] > counts[0].name[:10]:
        counts = []
    return [*counts, *times]


def page() -> str:
    """The tables of the files of `newest`."""
    files = newest()
    some = {name for name in _SHOWN if name != "step_ms"}
    parts = []
    for path in files:
        result = json.loads(path.read_text())
        shown = {"step_ms"} if len(files) > 1 and path == files[-1] else some | {"step_ms"}
        parts += [f"[{path.stem}](../benchmarks/results/{path.name}):", table(result, shown)]
    return "\n\n".join(parts)


def publish() -> str:
    """Write the tables into the page."""
    fill(PAGE, "scaling.py --publish", page())
    return f"wrote {PAGE}"


def table(result: Mapping[str, Any], shown: set[str] | None = None) -> str:
    """A table for each ladder and quantity, by cluster, and how it grows; and what the clock foretells.

    Args:
        shown: the quantities; None: all that there are.
    """
    about = result["hardware"]
    parts = [
        f"{about['date']}, {about['cpu']}, {about['cores']} cores, Python {about['python']}, torch "
        f"{about['torch']}, tacit at {about['commit']}. {result['parameters']:,} parameters."
    ]
    for ladder, title in TITLES.items():
        rows = [row for row in result["rows"] if row["ladder"] == ladder]
        grown = [row for row in result["growth"] if row["ladder"] == ladder]
        for name, (text, form) in _SHOWN.items():
            some = [row for row in rows if row.get(name) is not None]
            if some and (shown is None or name in shown):
                parts += [f"**{text}: {title[0].lower()}{title[1:]}**", _ladder(some, grown, name, form)]
        memory = dict[str, float]()
        for row in rows:
            if "resident_mb" in row:
                memory[row["cluster"]] = max(row["resident_mb"], memory.get(row["cluster"], 0.0))
        if memory and shown != {"step_ms"}:
            held = ", ".join(f"{each:.0f}" for each in memory.values())
            parts.append(f"A rank held at most {held} MB.")
        sent = [f"{row['mb_by_servers']:.1f}" for row in rows if row["mb_by_servers"]]
        if sent and shown != {"step_ms"}:
            parts.append(f"What the server's interface sends in a step of `ps`: {', '.join(sent)} MB.")
    if "foretold" in result and shown != {"step_ms"}:
        parts += ["**By the planner's clock: MB that a node sends in a step; milliseconds of it**"]
        parts += [_foretold(result["foretold"])]
    return "\n\n".join(parts)


def _ladder(
    rows: Sequence[Mapping[str, Any]], grown: Sequence[Mapping[str, Any]], name: str, form: str
) -> str:
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    found = {(row["arm"], row["cluster"]): row for row in rows}
    lines = []
    for about in grown:
        mine = [found.get((about["arm"], cluster)) for cluster in clusters]
        if about["arm"] != COMPUTE_ONLY or name in {"step_ms", "cpu_ms"}:
            cells = ["-" if row is None else form.format(row[name]) for row in mine]
            lines.append([f"`{about['arm']}`", *cells, _exponent(about.get(name))])
    return markdown(["", *(cluster.partition("@")[0] for cluster in clusters), "grows"], lines)


def _foretold(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    nodes = [f"{each['nodes']:,.0f} nodes" for each in next(iter(found.values()))]
    lines = [
        [f"`{arm}`", *(f"{each['mb']:.3g}; {each['ms']:.0f}" for each in line)] for arm, line in found.items()
    ]
    return markdown(["", *nodes], lines)


def _exponent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
