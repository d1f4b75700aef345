"""How a step's time, bytes, messages and processor time, and a rank's memory grow with the ranks: 2 to 32.

    python benchmarks/scaling.py --save         # on a quiet machine: a quarter of an hour
    python benchmarks/scaling.py --counts --save    # all but the seconds, which need no quiet: a quarter
    python benchmarks/scaling.py --quick        # about 7 minutes: fewer blocks, and the largest left out
    python benchmarks/scaling.py --only nodes   # one ladder
    python benchmarks/scaling.py --table        # of what was saved last; --publish writes docs/scaling.md

What many ranks on few cores cannot show is left small: a rank's step computes next to nothing (one sample
through two layers), but exchanges 1.05 million parameters, on links of 100 Mbit/s, one thread a rank. All
arms of a cluster run interleaved in one launch, in 0.9 GB a rank; with --counts one after the other.

* `flat`: Nx1 for N = 2, 4, 8, 16, with --counts 32.
* `nodes`: nodes of 2 ranks, 2x2, 4x2 and 8x2; and 4x4.
* `server`: Nx1 for N = 2, 4, 8, with a parameter server.

A run that was interrupted goes on with the cluster where it was, from tacit-out/scaling-rows.jsonl.

Bytes are what a node's interface has sent, shared out over its ranks, in whole blocks, with the end of
what was under way; packets likewise, as TCP counts them, with its acknowledgements; for `ps` bytes also what
the server's interface has sent. Processor time is of all of a rank's threads, the mean over ranks. Seconds
are those of the slowest rank. Sockets and threads are what an algorithm has opened until its second block.
Memory is what a rank holds with all arms attached, by --counts the most with one. Growth is the exponent e of
ranks^e that fits best (least squares of the logarithms), over clusters with equal nodes.

Beside them stands what the planner's clock foretells for up to 1,024 nodes of these links: the bytes, and the
seconds if computing and coding cost nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

import scaling_table
from kept import StateSlice, fingerprint
from launched import in_testbed, refuse_early, tell
from paired import ROOT, conclude, hardware
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
        counted: larger ones, for --counts alone, where not all arms are in memory at once.
    """

    clusters: Sequence[str]
    arms: Mapping[str, str]
    slow: Sequence[str] = ()
    counted: Sequence[str] = ()


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
        ("2x1@100mbit", "4x1@100mbit", "8x1@100mbit", "16x1@100mbit"),
        {
            **SYNCHRONOUS,
            "powersgd-hd": "powersgd:rank=2,topology=halving-doubling",
            "qsgd": "qsgd",
            "efsign": "efsign",
            "localsgd": f"localsgd:sync_every={PERIOD}",
            "sgp": "sgp",
        },
        slow=("16x1@100mbit",),
        counted=("32x1@100mbit",),
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
        slow=("8x2@100mbit", "4x4@100mbit"),
    ),
    "server": Ladder(
        ("2x1+1@100mbit", "4x1+1@100mbit", "8x1+1@100mbit"),
        {COMPUTE_ONLY: COMPUTE_ONLY, "ps": "ps"},
        slow=("8x1+1@100mbit",),
    ),
}
FORETOLD = (2, 4, 8, 16, 32, 128, 1024)
"""Nodes of one rank."""
PLANNED = {**LADDERS["flat"].arms, "topk-two-phase": "topk:ratio=0.01,topology=two-phase"}
"""What is foretold there, beside what is measured."""


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


def held() -> tuple[float, float]:
    """This process's sockets and threads."""
    sockets = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            sockets += os.readlink(each).startswith("socket:")
        except FileNotFoundError:  # that of the listing itself
            continue
    return float(sockets), float(len([*Path("/proc/self/task").iterdir()]))


def resident() -> float:
    """The MB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def rank_main(ladder: str, blocks: int) -> None:
    """Measure all arms on this cluster, one block of each in turn, or several interleaved; rank 0 tells."""
    from arms import ranks

    arms = LADDERS[ladder].arms
    with ranks() as rank:
        found: dict[str, dict[str, Any]] = {}
        alone = held()
        for names in [[name] for name in arms] if blocks == 1 else [[*arms]]:
            found |= measured({name: arms[name] for name in names}, blocks, alone)
            gc.collect()
        if rank == 0:
            tell(found)


def measured(texts: Mapping[str, str], blocks: int, alone: tuple[float, float]) -> dict[str, dict[str, Any]]:
    """What so many blocks of these arms take, and what they have opened; all are attached at once.

    Args:
        alone: what was `held` before any; what the arm before these had may be gone only when they attach.
    """
    import torch
    import torch.distributed as dist

    from arms import Blocks, Trainer, timed
    from tacit.transports.network_interfaces import segments

    class Counted(Blocks):
        """Counts packets and processor time of its blocks."""

        packets, cpu = 0, 0.0

        def take(self) -> None:
            """One block."""
            packets, cpu = segments().sent, process_time()
            super().take()
            self.packets += segments().sent - packets
            self.cpu += process_time() - cpu

    arms: dict[str, Counted] = {}
    opened = list[float]()
    for name, text in texts.items():
        dist.barrier()
        before = held() if arms else alone
        steps = STEPS.get(name, PERIOD)
        arms[name] = Counted(Trainer(text, epochs=(1, FOREVER), work=small_work()), steps)
        # Buckets settle in the fourth round of what is synchronous, and ddp's buckets in the second step.
        arms[name].trainer.steps(min(PERIOD, 2 * steps))
        opened += [after - first for after, first in zip(held(), before, strict=True)]
    first = dist.get_rank() == 0
    by_server = {name: by_servers(arm) for name, arm in arms.items()} if first else {}
    seconds = timed(arms, blocks)
    most = torch.tensor([*opened, resident()], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    cpu = torch.tensor([arm.cpu / blocks / arm.steps for arm in arms.values()], dtype=torch.float64)
    dist.all_reduce(cpu)
    mates = int(os.environ["LOCAL_WORLD_SIZE"])
    found = {
        name: {
            "step_ms": [1e3 * each for each in seconds[name]],
            "mb_per_rank": arm.megabytes / mates,
            "mb_by_servers": (by_servers(arm) - by_server[name]) / (blocks * arm.steps) / 1e6
            if first
            else 0.0,
            "packets": arm.packets / blocks / arm.steps / mates,
            "cpu_ms": 1e3 * float(cpu[i]) / dist.get_world_size(),
            "sockets": float(most[2 * i]),
            "threads": float(most[2 * i + 1]),
            "resident_mb": float(most[-1]),
        }
        for i, (name, arm) in enumerate(arms.items())
    }
    dist.barrier()
    for arm in arms.values():
        arm.trainer.close()
    return found


# ---- in the testbed -----------------------------------------------------------------------------------


def climb(name: str, quick: bool, blocks: int, kept: StateSlice, failed: list[str]) -> list[dict[str, Any]]:
    """All clusters of a ladder: a row for each and each arm; those without are told to `failed`."""
    ladder, rows = LADDERS[name], []
    for cluster in (*ladder.clusters, *(ladder.counted if blocks == 1 else ())):
        if quick and cluster in ladder.slow:
            continue
        try:
            found = _on(cluster, name, blocks, kept)
        except SystemExit as error:
            print(f"{cluster} is left out: {error}", file=sys.stderr)
            failed.append(cluster)
            continue
        rows += [_row(name, cluster, arm, each) for arm, each in found.items()]
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
        done = {**asked, "found": in_testbed(cluster, words, servers=servers, timeout=1800)}
        kept.keep(done)
    found: dict[str, Any] = done["found"]
    return found


def _row(ladder: str, cluster: str, arm: str, found: Mapping[str, Any]) -> dict[str, Any]:
    from tacit_lab.cluster import Cluster

    shape = Cluster.parse(cluster)
    return {
        "ladder": ladder,
        "cluster": cluster,
        "ranks": shape.world_size,
        "ranks_per_node": shape.ranks_per_node,
        "arm": arm,
        "attached": LADDERS[ladder].arms[arm],
        "step_ms": statistics.median(found["step_ms"]),
        "blocks_ms": found["step_ms"],
        **{each: found[each] for each in ("mb_per_rank", "mb_by_servers", *scaling_table.COUNTS)},
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
        for name in ("step_ms", "mb_per_rank", *scaling_table.COUNTS):
            about[name] = exponent({ranks: row[name] for ranks, row in steps.items()})
        found.append(about)
    return found


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'cluster':15} {'arm':13} {'step ms':>8} {'MB/rank':>8} {'packets':>8} {'cpu ms':>7} sockets"]
    lines += [
        f"{row['cluster']:15} {row['arm']:13} {row['step_ms']:8.1f} {row['mb_per_rank']:8.3f} "
        f"{row['packets']:8.0f} {row['cpu_ms']:7.1f} {row['sockets']:7.0f}"
        for row in rows
    ]
    return "\n".join(lines)


# ---- by the planner's clock ---------------------------------------------------------------------------


def foretell(nodes: Sequence[int] = FORETOLD) -> dict[str, list[dict[str, float]]]:
    """For each arm of `PLANNED` that can be: MB a step, and ms of it, on so many nodes.

    Computing and coding cost nothing here, but for a millisecond.
    """
    from tacit.algorithms import parse
    from tacit.errors import ConfigError
    from tacit.planning.cluster_prediction import predict
    from tacit.planning.profile import ParamReady, Profile, StepProfile
    from tacit.planning.simulation.costs import without_cost
    from tacit_lab.cluster import Cluster
    from tacit_lab.cluster_plans import of_cluster

    shapes = [(WIDTH,), (WIDTH, WIDTH // 2), (WIDTH // 2,), (WIDTH // 2, WIDTH)]
    parameters = tuple(ParamReady(f"p{i}", shape, "float32", 0.001) for i, shape in enumerate(shapes))
    profile = Profile(StepProfile(0.0, 0.0, 0.001, 0.0, parameters), 25 << 20, 1, 1, 4, 0.0, 0.0, 0, 0)
    found: dict[str, list[dict[str, float]]] = {}
    for arm, text in PLANNED.items():
        try:
            for count in nodes if arm != COMPUTE_ONLY else ():
                strategy, network = parse(text), of_cluster(Cluster.parse(f"{count}x1@100mbit"), profile)
                free = without_cost(strategy, profile, count, 1)
                step = predict(strategy, profile.with_costs([free]), network)
                about = {"nodes": count, "ms": 1e3 * step.seconds, "mb": step.bytes_out / 1e6}
                found.setdefault(arm, []).append(about)
        except ConfigError:  # what it sends depends on the training
            found.pop(arm, None)
    return found


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks, and the largest left out")
    parser.add_argument("--counts", action="store_true", help="one block, whose seconds are not kept")
    parser.add_argument("--only", choices=list(LADDERS), help="one ladder")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-scaling.json")
    parser.add_argument("--table", action="store_true", help="the tables of what was saved last, and no more")
    parser.add_argument("--publish", action="store_true", help="write the tables into docs/scaling.md")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.rank, options.blocks)
    if options.table or options.publish:
        return print(scaling_table.publish() if options.publish else scaling_table.page())
    names = [options.only] if options.only else [*LADDERS]
    refuse_early(LADDERS[names[0]].clusters[0])
    about, kept = hardware(), StateSlice(ROWS)
    failed: list[str] = []
    blocks = 1 if options.counts else 2 if options.quick else 5
    rows = [row for name in names for row in climb(name, options.quick, blocks, kept, failed)]
    found = growth(rows)
    if options.counts:
        rows = [{**row, **dict.fromkeys(("step_ms", "blocks_ms"))} for row in rows]
    result = {
        "benchmark": "scaling" + "-counts" * options.counts,
        "quick": options.quick,
        "hardware": about,
        "parameters": WIDTH * WIDTH + WIDTH // 2 + WIDTH,
        "rows": rows,
        "growth": found,
        "foretold": foretell(),
    }
    conclude(result, scaling_table.table(result), options)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command tries them again, and no others")
    return kept.forget()


if __name__ == "__main__":
    main()
