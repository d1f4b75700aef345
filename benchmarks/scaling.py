"""How step time and bytes grow with the number of ranks: 2, 4, 8 and 16 on one machine, by family.

    python benchmarks/scaling.py              # about 25 minutes
    python benchmarks/scaling.py --quick      # about 13 minutes: fewer blocks, and a cluster less
    python benchmarks/scaling.py --only nodes # one ladder
    python benchmarks/scaling.py --table benchmarks/results/DATE-scaling.json    # the table as Markdown

What many ranks on few cores cannot show is left small: a rank's step computes next to nothing (one sample
through two layers), but exchanges 1.05 million parameters, on links of 100 Mbit/s, one thread a rank. All
arms of a cluster run interleaved in one launch.

* `flat`: Nx1 for N = 2, 4, 8, 16, with a parameter server beside the nodes.
* `nodes`: nodes of 2 ranks, 2x2, 4x2 and 8x2 (left out by --quick); and 4x4.

A run that was interrupted goes on with the cluster where it was, from tacit-out/scaling-rows.jsonl.

Bytes are what a node's interface has sent, shared out over its ranks, in whole blocks, with the end of
what was under way; for `ps` also what the server's interface has sent. `beyond` is the step's time without
that of `compute-only`; it holds what compressing and waking up cost ranks that share the cores, which on a
cluster they would not: bytes are the better guide there. Growth is the exponent e of ranks^e that fits best
(least squares of the logarithms), over clusters with equal nodes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import scaling_table
from kept import StateSlice, fingerprint
from launched import in_testbed, refuse_early, tell
from paired import ROOT, add_table, conclude, hardware
from runs import COMPUTE_ONLY, FOREVER

if TYPE_CHECKING:
    from arms import Blocks, Work

PERIOD = 4
"""Steps between the rounds of what is periodic, and in a block."""
STEPS = {"ps": 1}
"""In a block, where it is not a period: through one server's link, 16 workers take 10 s a step."""
WIDTH = 1024
ROWS = ROOT / "tacit-out" / "scaling-rows.jsonl"


@dataclass(frozen=True)
class Ladder:
    """Clusters to climb, and what is measured on each.

    Attributes:
        clusters: the smallest first; `slow`: those that --quick leaves out.
        arms: name -> what is attached.
    """

    clusters: Sequence[str]
    arms: Mapping[str, str]
    slow: Sequence[str] = ()


SYNCHRONOUS = {
    COMPUTE_ONLY: COMPUTE_ONLY,
    "ddp": "ddp",
    "bf16": "bf16",
    "topk": "topk:ratio=0.01",
    "powersgd": "powersgd:rank=2",
    "lag": "lag",
    "fusion": "fusion:megabytes=4",
    "pipesgd": "pipesgd",
}
LADDERS = {
    "flat": Ladder(
        ("2x1+1@100mbit", "4x1+1@100mbit", "8x1+1@100mbit", "16x1+1@100mbit"),
        {
            **SYNCHRONOUS,
            "qsgd": "qsgd",
            "localsgd": f"localsgd:sync_every={PERIOD}",
            "sgp": "sgp",
            "ps": "ps",
        },
    ),
    "nodes": Ladder(
        ("2x2@100mbit", "4x2@100mbit", "8x2@100mbit", "4x4@100mbit"),
        {
            **SYNCHRONOUS,
            "ednncomm": f"ednncomm:sync_every={PERIOD}",
            "daso": f"daso:period={PERIOD},warmup_epochs=0,cooldown_epochs=0",
            # Not beside a server: it would use it too, and a process joins one but once.
            "predictive": f"predictive:sync_every={PERIOD}",
        },
        slow=("8x2@100mbit",),
    ),
}


# ---- in a rank ----------------------------------------------------------------------------------------


def small_work() -> Work:
    """One sample through two layers of 1.05 million parameters together."""
    import torch
    from torch import nn

    from arms import Work, momentum_sgd

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH // 2), nn.ReLU(), nn.Linear(WIDTH // 2, WIDTH))
    x = torch.randn(1, WIDTH)
    return Work(model, momentum_sgd, lambda: (x, x), nn.functional.mse_loss)


def by_servers(arm: Blocks) -> int:
    """The bytes that servers have sent since they began."""
    session = arm.trainer.session
    return sum(each["transmitted"] or 0 for each in session.servers()) if session else 0


def rank_main(ladder: str, blocks: int) -> None:
    """Measure all arms on this cluster; rank 0 prints the result."""
    from arms import Blocks, Trainer, ranks, timed

    with ranks() as rank:
        arms = {
            name: Blocks(Trainer(text, epochs=(1, FOREVER), work=small_work()), STEPS.get(name, PERIOD))
            for name, text in LADDERS[ladder].arms.items()
        }
        for arm in arms.values():
            # Buckets settle in the fourth round of what is synchronous, and ddp's buckets in the second step.
            arm.trainer.steps(min(PERIOD, 2 * arm.steps))
        before = {name: by_servers(arm) for name, arm in arms.items()} if rank == 0 else {}
        seconds = timed(arms, blocks)
        if rank == 0:
            mates = int(os.environ["LOCAL_WORLD_SIZE"])
            tell(
                {
                    name: {
                        "step_ms": [1e3 * each for each in seconds[name]],
                        "mb_per_rank": arm.megabytes / mates,
                        "mb_by_servers": (by_servers(arm) - before[name]) / (blocks * arm.steps) / 1e6,
                    }
                    for name, arm in arms.items()
                }
            )
        for arm in arms.values():
            arm.trainer.close()


# ---- in the testbed -----------------------------------------------------------------------------------


def climb(name: str, quick: bool, kept: StateSlice, failed: list[str]) -> list[dict[str, Any]]:
    """All clusters of a ladder: a row for each and each arm; those without are told to `failed`."""
    ladder, rows = LADDERS[name], []
    for cluster in ladder.clusters:
        if quick and cluster in ladder.slow:
            continue
        try:
            found = _on(cluster, name, 2 if quick else 5, kept)
        except SystemExit as error:
            print(f"{cluster} is left out: {error}", file=sys.stderr)
            failed.append(cluster)
            continue
        limit = statistics.median(found[COMPUTE_ONLY]["step_ms"])
        rows += [_row(name, cluster, arm, each, limit) for arm, each in found.items()]
        print(as_text(rows[-len(found) :]), file=sys.stderr)
    return rows


def _on(cluster: str, ladder: str, blocks: int, kept: StateSlice) -> dict[str, Any]:
    """What is found on a cluster, now or before the interruption."""
    from tacit_lab.testbed import Serving

    asked = {
        "ladder": ladder,
        "cluster": cluster,
        "blocks": blocks,
        "code": fingerprint("arms.py", "paired.py", "scaling.py"),
    }
    done = kept.find(asked)
    if done is None:
        words = [__file__, "--rank", ladder, "--blocks", str(blocks)]
        servers = Serving() if "+" in cluster else None
        done = {**asked, "found": in_testbed(cluster, words, servers=servers, timeout=1200)}
        kept.keep(done)
    found: dict[str, Any] = done["found"]
    return found


def _row(ladder: str, cluster: str, arm: str, found: Mapping[str, Any], limit: float) -> dict[str, Any]:
    from tacit_lab.cluster import Cluster

    shape, step = Cluster.parse(cluster), statistics.median(found["step_ms"])
    return {
        "ladder": ladder,
        "cluster": cluster,
        "ranks": shape.world_size,
        "ranks_per_node": shape.ranks_per_node,
        "arm": arm,
        "attached": LADDERS[ladder].arms[arm],
        "step_ms": step,
        "beyond_ms": step - limit,
        "blocks_ms": found["step_ms"],
        "mb_per_rank": found["mb_per_rank"],
        "mb_by_servers": found["mb_by_servers"],
    }


# ---- growth -------------------------------------------------------------------------------------------


def exponent(points: Mapping[int, float]) -> float | None:
    """The e of ranks^e that fits best; None for fewer than two points, or where one is not above zero."""
    if len(points) < 2 or min(points.values()) <= 0:
        return None
    x = [math.log(ranks) for ranks in points]
    return statistics.linear_regression(x, [math.log(value) for value in points.values()]).slope


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How each arm's numbers grow over a ladder's clusters with the smallest nodes."""
    found = []
    for ladder, arm in dict.fromkeys((row["ladder"], row["arm"]) for row in rows):
        mine = [row for row in rows if (row["ladder"], row["arm"]) == (ladder, arm)]
        least = min(row["ranks_per_node"] for row in mine)
        steps = {row["ranks"]: row for row in mine if row["ranks_per_node"] == least}
        about: dict[str, Any] = {"ladder": ladder, "arm": arm, "ranks": list(steps)}
        for name in ("step_ms", "beyond_ms", "mb_per_rank", "mb_by_servers"):
            about[name] = exponent({ranks: row[name] for ranks, row in steps.items()})
        found.append(about)
    return found


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'cluster':15} {'arm':13} {'step ms':>8} {'beyond':>8} {'MB/rank':>8} {'MB servers':>10}"]
    lines += [
        f"{row['cluster']:15} {row['arm']:13} {row['step_ms']:8.1f} {row['beyond_ms']:8.1f} "
        f"{row['mb_per_rank']:8.3f} {row['mb_by_servers']:10.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def growth_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Exponents as text; 0 stays, 1 doubles as the ranks do."""

    def number(value: float | None) -> str:
        return f"{'-':>8}" if value is None else f"{value:8.2f}"

    lines = [f"{'growth':8} {'arm':13} {'step':>8} {'beyond':>8} {'MB/rank':>8} {'servers':>8}  over ranks"]
    names = ("step_ms", "beyond_ms", "mb_per_rank", "mb_by_servers")
    lines += [
        f"{row['ladder']:8} {row['arm']:13} {' '.join(number(row[name]) for name in names)}  "
        f"{', '.join(map(str, row['ranks']))}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks, and a cluster less")
    parser.add_argument("--only", choices=list(LADDERS), help="one ladder")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-scaling.json")
    add_table(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.blocks)
        return
    if options.table is not None:
        print(scaling_table.table(options.table))
        return
    names = [options.only] if options.only else [*LADDERS]
    refuse_early(LADDERS[names[0]].clusters[0])
    about, kept = hardware(), StateSlice(ROWS)
    failed: list[str] = []
    rows = [row for name in names for row in climb(name, options.quick, kept, failed)]
    found = growth(rows)
    result = {
        "benchmark": "scaling",
        "quick": options.quick,
        "hardware": about,
        "parameters": WIDTH * WIDTH + WIDTH // 2 + WIDTH,
        "rows": rows,
        "growth": found,
    }
    conclude(result, f"{as_text(rows)}\n\n{growth_table(found)}", options)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command tries them again, and no others")
    kept.forget()


if __name__ == "__main__":
    main()
