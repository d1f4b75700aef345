"""What periodic strategies leave of a machine's speed: VGG-11, all arms interleaved in one run.

    python benchmarks/rounds.py            # about 12 minutes
    python benchmarks/rounds.py --quick    # about 3 minutes: periods of an eighth, and no promise is judged
    python benchmarks/rounds.py --json     # the last line on stdout is one JSON object

On 4 nodes of 1 rank, links of 100 Mbit/s, one thread and 32 images a rank, fp32. Every arm runs the same
number of steps, in blocks of 16 by turns, until the longest period is over; what counts is the time of all of
them, so that each round is paid in full. Rounds that are under way when a block ends are waited for in that
block's time: no arm hides its exchange in another's turn.

* `diloco`, dense, every 128 steps; in 4 bits, every 64; `streaming-diloco` every 64, in 8 fragments, in bf16.
* `noop`: DDP with a hook that exchanges nothing; `idle`: local SGD attached, whose round is never due.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from launched import in_testbed, tell
from paired import Arm, conclude, hardware, paired_ratio, verdict

CLUSTER = "4x1@100mbit"
BLOCK, BLOCKS = 16, 8
EIGHTH = 8

ARMS = {
    "compute-only": "compute-only",
    "noop": "noop",
    "idle": "localsgd:sync_every=1000000",
    "diloco": "diloco:sync_every={128}",
    "diloco, 4 bits": "diloco:sync_every={64},bits=4",
    "streaming-diloco": "streaming-diloco:sync_every={64},fragments=8,bits=16,fragment_sync_delay=5",
}
PROMISED = {
    "idle": ("noop", 0.99),
    "diloco": ("compute-only", 0.88),
    "diloco, 4 bits": ("compute-only", 0.90),
    "streaming-diloco": ("compute-only", 0.92),
}
"""Arm -> (against what, at least this share of its speed)."""


def text(arm: str, quick: bool) -> str:
    """What the arm attaches."""
    for period in (128, 64):
        arm = arm.replace(f"{{{period}}}", str(period // EIGHTH if quick else period))
    return arm


def rank_main(quick: bool) -> None:
    """Measure all arms; rank 0 prints the result."""
    from arms import Trainer, on_all_ranks, ranks

    with ranks() as rank:
        trainers = {name: Trainer(text(arm, quick)) for name, arm in ARMS.items()}
        block = BLOCK // EIGHTH if quick else BLOCK
        # The warm-up ends in the middle of a fragment's turn, so that no block ends as a round has just left.
        arms = {name: Arm(partial(trainer.steps, block), 1, 0) for name, trainer in trainers.items()}
        for trainer in trainers.values():
            for _ in range(1 if quick else 4):
                trainer.step()
        seconds = on_all_ranks(arms, BLOCKS)
        if rank == 0:
            found = {
                name: {
                    "seconds": [each / block for each in seconds[name]],
                    "rounds": trainer.session.metrics()["rounds"] if trainer.session else 0,
                    "mb_per_step": sum(trainer.sent) / len(trainer.sent) / 1e6,
                }
                for name, trainer in trainers.items()
            }
            tell(found)
        for trainer in trainers.values():
            trainer.close()


def measure(quick: bool) -> list[dict[str, object]]:
    """Run all arms in the testbed; one row an arm."""
    found = in_testbed(CLUSTER, [__file__, "--rank", *(["--quick"] if quick else [])])
    return [_row(name, found, quick) for name in found]


def _row(name: str, found: Mapping[str, dict[str, object]], quick: bool) -> dict[str, object]:
    seconds = {arm: _floats(each["seconds"]) for arm, each in found.items()}
    against, promised = PROMISED.get(name, (None, None))
    # Rounds are in some blocks and not in others: sums, not medians, say what a period costs.
    # In `idle` a round is never due, and the median is steadier.
    share = None
    if against is not None:
        total = sum(seconds[against]) / sum(seconds[name])
        share = paired_ratio(seconds[against], seconds[name])["median"] if name == "idle" else total
    return {
        "arm": name,
        "attached": text(ARMS[name], quick),
        "step_ms": 1e3 * statistics.mean(seconds[name]),
        "of_compute_only": sum(seconds["compute-only"]) / sum(seconds[name]),
        "blocks_ms": [1e3 * each for each in seconds[name]],
        "rounds": found[name]["rounds"],
        "mb_per_step_and_node": found[name]["mb_per_step"],
        "against": against,
        "promised": promised,
        "found": share,
        "met": None if quick or share is None else share >= (promised or 0.0),
    }


def _floats(values: object) -> list[float]:
    assert isinstance(values, list)
    return values


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as text."""
    lines = [
        f"{'arm':18} {'step ms':>8} {'of compute':>10} {'rounds':>6} {'MB/step':>8}  promised, of what: found"
    ]
    for row in rows:
        line = (
            f"{row['arm']:18} {row['step_ms']:8.0f} {row['of_compute_only']:10.3f} {row['rounds']:6.0f} "
            f"{row['mb_per_step_and_node']:8.2f}"
        )
        lines.append(line + verdict(row))
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="periods and blocks of an eighth")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-rounds.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.quick)
        return
    rows = measure(options.quick)
    result = {
        "benchmark": "rounds",
        "quick": options.quick,
        "hardware": hardware(),
        "cluster": CLUSTER,
        "block_steps": BLOCK // EIGHTH if options.quick else BLOCK,
        "rows": rows,
    }
    conclude(result, table(rows), options)


if __name__ == "__main__":
    main()
