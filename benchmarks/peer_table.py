"""The runs of `benchmarks/peers.py`, summed up over their seeds and written as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fingerprints
from markdown_tables import fill, markdown
from paired import ROOT
from peer_list import PEERS, Peer

UNSHAPED = "4x1"
"""The cluster on which accuracies are found."""
CHOOSING = 1000
"""The seed that chooses learning rates."""
TARGET = 0.95
ABSENT = "does not install"
"""How the message of a run begins whose peer is not there."""
PAGE = ROOT / "docs" / "peers.md"
STALE = " \\*"
"""What stands behind a row that is not of today's code."""

Row = Mapping[str, Any]


def rate_of(rows: Iterable[Row]) -> float | None:
    """The learning rate of the run that ended best: by accuracy, then by loss; None where none ended."""
    well = [row for row in rows if row["status"] == "ok"]
    return max(well, key=_goodness)["task"]["rate"] if well else None


def _goodness(row: Row) -> tuple[float, float]:
    last = row["evaluations"][-1]
    return last["accuracy"], -last["loss"]


def stands(row: Row) -> bool:
    """Whether a run is of the peer's version that is wanted now, or of today's algorithm of tacit."""
    if row["side"] == "peer":
        return any(row["who"] == peer.who for peer in PEERS)
    mark, algorithm = row["fingerprint"], row["task"]["algorithm"]
    return mark is not None and fingerprints.same(mark, fingerprints.fingerprint(algorithm))


def publish(rows: Iterable[Row]) -> Path:
    """Write the tables into the page."""
    fill(PAGE, "peers.py --publish", table(rows))
    return PAGE


def table(rows: Iterable[Row], stands: Callable[[Row], bool] = stands) -> str:
    """What was found: where, seconds on each cluster, accuracies, and what failed with which words."""
    trained: dict[tuple[str, str], dict[tuple[int, float], Row]] = {}
    timed: dict[str, dict[tuple[str, str], dict[int, Row]]] = {}
    for row in rows:  # the last of each kind counts
        cluster, task = row["cluster"], row["task"]
        if cluster == UNSHAPED:
            trained.setdefault((row["side"], row["arm"]), {})[task["seed"], task["rate"]] = row
        else:
            pair = timed.setdefault(cluster, {}).setdefault((row["peer"], row["side"]), {})
            pair[task["seed"]] = row
    known = [(peer, side) for peer in PEERS for side in ("peer", "tacit") if side == "peer" or peer.ours]
    parts = []
    if timed:
        parts += [
            _where("Times", [r for each in timed.values() for found in each.values() for r in found.values()])
        ]
        lines = [_times(peer, side, timed, stands) for peer, side in known]
        head = [
            "",
            "",
            *(text for cluster in timed for text in (f"ms a step, `{cluster}`", "ours, of theirs")),
        ]
        parts += [markdown([*head, "MB a node and step", "MB memory"], [each for each in lines if each])]
    if trained:
        parts += [_where("Accuracies", [row for found in trained.values() for row in found.values()])]
        lines = [_accuracies(peer, side, trained, stands) for peer, side in known]
        head = ["", "", "learning rate", "accuracy", f"steps to {TARGET:.0%}", "apart"]
        parts += [markdown(head, list(dict.fromkeys(map(tuple, filter(None, lines)))))]
    every = [row for found in trained.values() for row in found.values()]
    failed = dict.fromkeys(_failure(row) for row in every if row["status"] != "ok")
    if failed:
        parts += ["What failed, with its last words:", "\n".join(failed)]
    if any(STALE in part for part in parts):
        parts += [f"{STALE.strip()} Of another version, or of an algorithm that is another now."]
    return "\n\n".join(parts)


def _where(what: str, rows: Sequence[Row]) -> str:
    """On what, when, and with what beside it."""

    def told(of: Callable[[Row], object]) -> str:
        return " and ".join(dict.fromkeys(str(of(row)) for row in rows))

    days = [row["hardware"]["date"] for row in rows]
    span = min(days) if min(days) == max(days) else f"{min(days)} to {max(days)}"
    busy = [row["busy"] for row in rows if "busy" in row]
    beside = "."
    if busy:  # of what did not install nothing ran
        beside = (
            f"; just before each run other work kept the cores busy to {statistics.median(busy):.0%} "
            f"(median), {max(busy):.0%} at most."
        )
    return (
        f"**{what}**: {span}, {told(lambda row: row['hardware']['cpu'])}, "
        f"{told(lambda row: row['hardware']['cores'])} cores, "
        f"torch {told(lambda row: row['hardware']['torch'])}, "
        f"tacit at {told(lambda row: row['hardware']['commit'])}; "
        f"runs of {told(lambda row: row['task']['steps'])} steps; "
        f"TCP by {told(lambda row: row.get('congestion_control', 'what the machine had'))}{beside}"
    )


def _names(peer: Peer, rows: Sequence[Row], side: str, stands: Callable[[Row], bool]) -> list[str]:
    mark = "" if all(map(stands, rows)) else STALE
    if side == "tacit":
        return [f"tacit{mark}", f"`{rows[-1]['task']['algorithm']}`"]
    return [f"{peer.who}{mark}", peer.does]


def _times(
    peer: Peer,
    side: str,
    timed: Mapping[str, Mapping[tuple[str, str], Mapping[int, Row]]],
    stands: Callable[[Row], bool],
) -> list[str]:
    """A line of the table of times; empty where there is nothing to compare."""
    cells: list[str] = []
    every: list[Row] = []
    for found in timed.values():
        mine, theirs = (
            {seed: row for seed, row in found.get((peer.name, who), {}).items() if row["status"] == "ok"}
            for who in (side, "peer")
        )
        every += mine.values()
        ratios = [_step(mine[seed]) / _step(theirs[seed]) for seed in mine if seed in theirs]
        cells.append(f"{1e3 * statistics.median(map(_step, mine.values())):.0f}" if mine else "")
        cells.append(_spread(ratios) if side == "tacit" and ratios else "")
    if not every or not peer.ours:
        return []
    sent = statistics.median(row["mb_per_node"] / row["task"]["steps"] for row in every)
    memory = max(row["peak_mb"] for row in every)
    return [*_names(peer, every, side, stands), *cells, f"{sent:.2f}", f"{memory:.0f}"]


def _step(row: Row) -> float:
    seconds: float = row["seconds"] / row["task"]["steps"]
    return seconds


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def _accuracies(
    peer: Peer,
    side: str,
    trained: Mapping[tuple[str, str], Mapping[tuple[int, float], Row]],
    stands: Callable[[Row], bool],
) -> list[str]:
    """A line of the table of accuracies."""
    found = trained.get((side, peer.ours if side == "tacit" else peer.way), {})
    if not found:
        return []
    rate = rate_of(row for (seed, _), row in found.items() if seed == CHOOSING)
    rows = [
        row for (seed, at), row in found.items() if seed != CHOOSING and at == rate and row["status"] == "ok"
    ]
    names = _names(peer, [*found.values()], side, stands)
    if rate is None or not rows:
        absent = any(row["message"].startswith(ABSENT) for row in found.values())
        why = ABSENT if absent else "failed"
        return [*names, why if rate is None else f"{rate:g}", "", "", ""]
    ends = [row["evaluations"][-1]["accuracy"] for row in rows]
    reached = [
        min((each["step"] for each in row["evaluations"] if each["accuracy"] >= TARGET), default=None)
        for row in rows
    ]
    steps = [each for each in reached if each is not None]
    few = "" if len(steps) == len(rows) else f" ({len(steps)} of {len(rows)})"
    return [
        *names,
        f"{rate:g}",
        f"{statistics.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})",
        f"{statistics.median(steps):.0f}{few}" if steps else "not reached",
        f"{max(row['apart'] for row in rows):.1g}",
    ]


def _failure(row: Row) -> str:
    what = (
        row["arm"] if row["side"] == "tacit" else next(peer.does for peer in PEERS if peer.way == row["arm"])
    )
    return f"* {row['who']}, {what}: `{row['message'].replace('`', chr(39))}`"
