"""Bounded loss: pushes that end at a deadline against pushes that wait for TCP, where packets are lost.

    python benchmarks/bounded_loss.py            # about 5 minutes
    python benchmarks/bounded_loss.py --quick    # about 3: fewer steps
    python benchmarks/bounded_loss.py --table benchmarks/results/DATE-bounded-loss.json

Four workers train `digits` (1 million parameters) through one server, where links are late and lose packets.
All arms write the same messages. A deadline of 60 seconds is never reached, so there all wait for TCP.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from launched import in_testbed, tell
from markdown_tables import markdown
from paired import add_table, conclude, hardware

CLUSTER = "4x1+1@100mbit,100ms,1%loss"
WAITS = 60
ARMS = ((0.05, WAITS), (0.05, 0.3), (0.05, 0.1), (0.01, WAITS))
"""(share of the entries, seconds after which a push ends)."""
_STEPS, _QUICK, _WARM = 44, 22, 2


def rank_main(algorithm: str, steps: int) -> None:
    """Train; the first rank tells."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tacit
    from arms import ranks
    from tacit_lab import recipes

    with ranks(600) as rank:
        recipe = recipes.get("digits")
        # Where packets are lost, a broadcast of the parameters, which are equal, takes a minute.
        model = DistributedDataParallel(recipe.model(0), init_sync=False)
        optimizer = recipe.optimizer(model)
        session = tacit.attach(model, optimizer, algorithm)
        batches = [
            b for epoch in range(3) for b in recipe.train_batches(epoch, rank, dist.get_world_size(), 0)
        ]
        ends = [time.perf_counter()]
        for inputs, targets in batches[:steps]:
            loss = recipe.loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ends.append(time.perf_counter())
        took = torch.tensor([b - a for a, b in pairwise(ends)])
        accuracy = recipe.evaluate(model.module)[1]
        metrics = session.metrics()
        session.close()
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if rank == 0:
            pushed, pulled = metrics["push_bytes"] / steps, metrics["pull_bytes"] / steps
            tell({"seconds": took[_WARM:].tolist(), "accuracy": accuracy, "pushed": pushed, "pulled": pulled})


def measured(ratio: float, deadline: float, steps: int, cluster: str) -> dict[str, Any]:
    """One arm; the bytes are those of the first rank, a step."""
    from tacit_lab.testbed.launch import Serving

    words = [__file__, "--rank", f"ps-topk:ratio={ratio},deadline={deadline}", "--steps", str(steps)]
    found = in_testbed(cluster, words, servers=Serving(), timeout=600)
    return {"ratio": ratio, "deadline": deadline, "cluster": cluster, "steps": steps, **found}


def table(result: Mapping[str, Any]) -> str:
    """A saved result as Markdown."""
    head = ["largest", "a push ends", "ms a step", "the slowest tenth", "kB up", "down", "accuracy"]
    lines = []
    for row in result["rows"]:
        ms = sorted(1e3 * each for each in row["seconds"])
        end = "when all is sent" if row["deadline"] == WAITS else f"after {row['deadline']:g} s"
        typical, slow = statistics.median(ms), statistics.mean(ms[-max(1, len(ms) // 10) :])
        up, down = row["pushed"] / 1e3, row["pulled"] / 1e3
        share = f"{100 * row['ratio']:g} %"
        lines.append(
            [
                share,
                end,
                f"{typical:.0f}",
                f"{slow:.0f}",
                f"{up:.0f}",
                f"{down:.0f}",
                f"{row['accuracy']:.3f}",
            ]
        )
    return markdown(head, lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--cluster", default=CLUSTER, help="with one server, such as 4x1+1@100mbit,100ms")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-bounded-loss.json")
    add_table(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table is not None:
        print(table(options.table))
        return
    if options.rank:
        rank_main(options.rank, options.steps)
        return
    steps = _QUICK if options.quick else _STEPS
    rows = []
    for ratio, deadline in ARMS:
        rows.append(measured(ratio, deadline, steps, options.cluster))
        print(table({"rows": rows[-1:]}).splitlines()[-1], flush=True)
    result = {"benchmark": "bounded-loss", "quick": options.quick, "hardware": hardware(), "rows": rows}
    conclude(result, table(result), options)


if __name__ == "__main__":
    main()
