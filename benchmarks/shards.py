"""A GPT that FSDP2 shards among all nodes: plain, and with weights and gradients in few bits.

    python benchmarks/shards.py             # time on 4x1@100mbit, and losses of three seeds, some minutes
    python benchmarks/shards.py --quick     # one seed, fewer steps
    python benchmarks/shards.py --only loss # which needs no quiet machine

A GPT of 644 thousand parameters learns to read Python's own library byte by byte: 8 samples of 128 bytes a
rank and step, AdamW, one thread a rank; each block is a `fully_shard`. There is no far axis and no session.

* `time`: seconds a step, all arms interleaved, and the bytes that a node's interface sends.
* `loss`: on held-out files, nats a byte, with shards as they are after the training; differences to plain
  FSDP2 by seed. All arms have the recipe's learning rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from itertools import chain, count
from typing import Any

from launched import in_testbed, tell
from paired import add_table, conclude, hardware, paired_ratio
from tacit_lab.intervals import Mean

PLAIN = "FSDP2"
ARMS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "weights 8": {"weights": 8, "gradients": None},
    "weights 8, gradients 8": {"weights": 8, "gradients": 8},
    "weights 8, gradients 4": {"weights": 8, "gradients": 4},
    "weights 8, gradients 4, feedback": {"weights": 8, "gradients": 4, "feedback": True},
    "weights 4, gradients 4, feedback": {"weights": 4, "gradients": 4, "feedback": True},
}
SHAPED, FULL_SPEED = "4x1@100mbit", "4x1"
PART = "--part"


class Training:
    """An arm at work."""

    def __init__(self, arm: str, seed: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        import tacit
        from tacit_lab.recipes.bytes import Bytes

        self.recipe = Bytes()
        self.model = self.recipe.model(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = self.recipe.optimizer(self.model)
        self.near = tacit.quantize_shards(self.model, seed=seed, **ARMS[arm]) if ARMS[arm] else None
        place = dist.get_rank(), dist.get_world_size(), seed
        self.batches = chain.from_iterable(self.recipe.train_batches(epoch, *place) for epoch in count())

    def step(self) -> None:
        """One step of the user's loop."""
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        self.recipe.loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def timed(blocks: int) -> None:
    """Seconds a step of every arm, interleaved, and the bytes that this node's interface sent in one."""
    import torch.distributed as dist

    from arms import on_all_ranks, ranks
    from paired import Arm
    from tacit_lab.testbed.network import counters

    with ranks(600) as rank:
        arms = {name: Training(name, 0) for name in ARMS}
        sent = dict.fromkeys(ARMS, 0)

        def block(name: str) -> None:
            before = counters.transmitted(os.environ["TACIT_INTERFACE"])
            arms[name].step()
            dist.barrier()
            sent[name] = counters.transmitted(os.environ["TACIT_INTERFACE"]) - before

        seconds = on_all_ranks({name: Arm(partial(block, name), 1, 1) for name in arms}, blocks)
        if rank == 0:
            tell({name: {"seconds": seconds[name], "mb": sent[name] / 1e6} for name in arms})


def losses(seed: int, steps: int) -> None:
    """The loss of each arm on held-out files after so many steps, nats a byte."""
    from arms import ranks

    with ranks() as rank:
        found = {}
        for name in ARMS:
            arm = Training(name, seed)
            for _ in range(steps):
                arm.step()
            if arm.near is not None:
                arm.near.close()
            found[name] = arm.recipe.evaluate(arm.model)[0]
        if rank == 0:
            tell(found)


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each arm."""
    told = partial(in_testbed, timeout=1500)
    times = {}
    if options.only != "loss":
        times = told(SHAPED, [__file__, PART, "time", "4" if options.quick else "10"])
    steps = "30" if options.quick else "120"
    seeds = range(1 if options.quick else options.seeds)
    ends = [told(FULL_SPEED, [__file__, PART, "loss", str(seed), steps]) for seed in seeds]
    return [
        {
            "arm": arm,
            **_time(times, arm),
            "loss": statistics.fmean(each[arm] for each in ends),
            "loss_gap": vars(Mean.of([each[arm] - each[PLAIN] for each in ends])),
        }
        for arm in ARMS
    ]


def _time(times: Mapping[str, Any], arm: str) -> dict[str, Any]:
    if not times:
        return {}
    return {
        "step_ms": 1e3 * statistics.median(times[arm]["seconds"]),
        "speedup": paired_ratio(times[PLAIN]["seconds"], times[arm]["seconds"]),
        "mb_per_step_and_node": times[arm]["mb"],
    }


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    gap = row["loss_gap"]
    width = "" if gap["half"] is None else f" ± {gap['half']:.3f}"
    time = f"{'':33}"
    if "step_ms" in row:
        time = f"{row['step_ms']:9.0f} {row['speedup']['median']:13.2f} {row['mb_per_step_and_node']:9.2f}"
    return f"{row['arm']:34} {time} {row['loss']:6.3f}  {gap['mean']:+.3f}{width}"


def main() -> None:
    """Launch the ranks, and print a table."""
    if PART in sys.argv:
        part, *numbers = sys.argv[sys.argv.index(PART) + 1 :]
        (timed if part == "time" else losses)(*map(int, numbers))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["loss"], help="train alone")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-shards.json")
    add_table(parser)
    options = parser.parse_args()
    found = options.table or {"benchmark": "shards", "hardware": hardware(), "rows": rows_of(options)}
    head = f"{'':34} {'ms a step':>9} {'times as fast':>13} {'MB a step':>9} {'loss':>6}  gap"
    conclude(found, "\n".join([head, *map(line, found["rows"])]), options)


if __name__ == "__main__":
    main()
