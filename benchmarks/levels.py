"""What strategies by levels leave of a node's own speed: VGG-11 on 2 nodes of 2, arms interleaved in a run.

    python benchmarks/levels.py                # about 15 minutes
    python benchmarks/levels.py --quick        # about 3 minutes: short blocks, and no promise is judged
    python benchmarks/levels.py --json         # the last line on stdout is one JSON object

One thread and 32 images a rank, fp32. The limit is `near-only`: torch's DDP among the ranks of a node, and
nothing between the nodes; `compute-only` has no exchange at all. What is under way when a block ends is
waited for in that block's time.

* `1gbit`: DASO while it cycles with (B, W, L) = (4, 1, 1), and eDNNcomm every 16 steps.
* `whole`: at 1 Gbit/s too, ten epochs of DASO, of which the first and the last block, against DDP.
* `100mbit`: DASO with the period that it chooses, in bf16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from launched import in_testbed, tell
from paired import Arm, conclude, hardware, paired_ratio, verdict
from runs import FOREVER

if TYPE_CHECKING:
    from arms import Trainer

CYCLING_ON = (1, FOREVER)
"""One epoch that does not end: cycling all the time."""


@dataclass(frozen=True)
class Scene:
    """One run.

    Attributes:
        arms: what is attached, by name.
        promised: arm -> (against what, at least this share of its speed).
        epochs: how many, and of how many steps.
        block: steps; `blocks`; `warmup` steps before them.
    """

    cluster: str
    arms: Mapping[str, str]
    promised: Mapping[str, tuple[str, float]]
    epochs: tuple[int, int] = CYCLING_ON
    block: int = 16
    blocks: int = 5
    warmup: int = 8
    exposed: Mapping[str, float] = field(default_factory=dict)


CYCLING = "daso:period=4,warmup_epochs=0,cooldown_epochs=0"
SCENES = {
    "1gbit": Scene(
        "2x2@1gbit",
        {
            "compute-only": "compute-only",
            "near-only": "near-only",
            "daso": CYCLING,
            "daso, slices": f"{CYCLING},by=slices",
            "ednncomm": "ednncomm:sync_every=16",
        },
        {
            "daso": ("near-only", 0.93),
            "daso, slices": ("near-only", 0.93),
            "ednncomm": ("near-only", 0.93),
        },
    ),
    # A block is an epoch: one of warm-up, eight of cycling, one of cool-down.
    "whole": Scene(
        "2x2@1gbit",
        {
            "ddp": "ddp",
            "near-only": "near-only",
            "daso": "daso:warmup_epochs=1,cooldown_epochs=1,by=slices",
        },
        {"daso": ("ddp", 1 / 0.66)},
        epochs=(10, 8),
        block=8,
        blocks=10,
        warmup=0,
    ),
    "100mbit": Scene(
        "2x2@100mbit",
        {
            "compute-only": "compute-only",
            "near-only": "near-only",
            "daso": "daso:period=auto,bits=16,by=slices,warmup_epochs=0,cooldown_epochs=0",
        },
        {"daso": ("near-only", 0.90)},
        block=32,
        blocks=4,
        warmup=14,
        exposed={"daso": 0.05},
    ),
}


def rank_main(name: str, quick: bool) -> None:
    """Measure all arms of a scene; rank 0 prints the result."""
    from arms import Trainer, on_all_ranks, ranks

    scene = SCENES[name]
    block, blocks = (scene.block // 4, max(2, scene.blocks // 4)) if quick else (scene.block, scene.blocks)
    epochs = scene.epochs if scene.epochs == CYCLING_ON else (blocks, block)
    with ranks() as rank:
        trainers = {arm: Trainer(text, epochs=epochs) for arm, text in scene.arms.items()}
        for trainer in trainers.values():
            for _ in range(scene.warmup):
                trainer.step()
        before = {arm: _exposed(trainer) for arm, trainer in trainers.items()}
        arms = {arm: Arm(partial(trainer.steps, block), 1, 0) for arm, trainer in trainers.items()}
        seconds = on_all_ranks(arms, blocks)
        if rank == 0:
            tell(
                {
                    arm: {
                        "seconds": [each / block for each in seconds[arm]],
                        "mb_per_step": sum(trainer.sent) / len(trainer.sent) / 1e6,
                        "exposed": (_exposed(trainer) - before[arm]) / sum(seconds[arm]),
                        "remembered": dict(trainer.session.levels[-1].session.schedule.state)
                        if trainer.session
                        else {},
                    }
                    for arm, trainer in trainers.items()
                }
            )
        for trainer in trainers.values():
            trainer.close()


def _exposed(trainer: Trainer) -> float:
    """Seconds for which training has waited for what crosses between the nodes."""
    return 0.0 if trainer.session is None else trainer.session.levels[-1].session.metrics()["exposed_seconds"]


def measure(name: str, quick: bool) -> list[dict[str, object]]:
    """Run a scene in the testbed; one row an arm."""
    words = [__file__, "--rank", name, *(["--quick"] if quick else [])]
    found = in_testbed(SCENES[name].cluster, words)
    return [_row(name, arm, found, quick) for arm in found]


def _row(name: str, arm: str, found: Mapping[str, dict[str, Any]], quick: bool) -> dict[str, object]:
    scene, seconds = SCENES[name], {arm: each["seconds"] for arm, each in found.items()}
    against, promised = scene.promised.get(arm, (None, None))
    share = None
    if against is not None:
        # The whole run is what counts there; elsewhere all blocks are alike, and the median is steadier.
        whole = scene.epochs != CYCLING_ON
        total = sum(seconds[against]) / sum(seconds[arm])
        share = total if whole else paired_ratio(seconds[against], seconds[arm])["median"]
    most = scene.exposed.get(arm)
    met = None
    if not quick and share is not None:
        met = share >= (promised or 0.0) and (most is None or found[arm]["exposed"] < most)
    return {
        "scene": name,
        "cluster": scene.cluster,
        "arm": arm,
        "attached": scene.arms[arm],
        "step_ms": 1e3 * statistics.mean(seconds[arm]),
        "blocks_ms": [1e3 * each for each in seconds[arm]],
        "mb_per_step_and_node": found[arm]["mb_per_step"],
        "exposed_share": found[arm]["exposed"],
        "remembered": found[arm]["remembered"],
        "against": against,
        "promised": promised,
        "found": share,
        "met": met,
    }


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as text."""
    lines = [
        f"{'scene':8} {'arm':14} {'step ms':>8} {'MB/step':>8} {'exposed':>8} {'B':>3}  "
        "promised, of what: found"
    ]
    for row in rows:
        remembered = row["remembered"]
        assert isinstance(remembered, dict)
        line = (
            f"{row['scene']:8} {row['arm']:14} {row['step_ms']:8.0f} {row['mb_per_step_and_node']:8.2f} "
            f"{row['exposed_share']:8.1%} {remembered.get('period', 0):3.0f}"
        )
        lines.append(line + verdict(row))
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short blocks, and few of them")
    parser.add_argument("--only", choices=list(SCENES), help="one scene")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-levels.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.quick)
        return
    names = [options.only] if options.only else list(SCENES)
    rows = [row for name in names for row in measure(name, options.quick)]
    result = {"benchmark": "levels", "quick": options.quick, "hardware": hardware(), "rows": rows}
    conclude(result, table(rows), options)


if __name__ == "__main__":
    main()
