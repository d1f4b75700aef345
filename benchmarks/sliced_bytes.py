"""What leaves a node in a step: the ranks of a node that share a gradient out, and those that do not.

`python benchmarks/order.py --only slices` runs it, on 2x2@1gbit, and counts at the node's interface.
Promised: where each rank of a node takes its slice of a gradient of n entries of b bytes across
(`Hierarchical`), n b bytes leave a node in a step, within 8 % for the headers of packets. A ring over all
ranks has 1.5 n b leave it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launched import in_testbed, tell

CLUSTER = "2x2@1gbit"
ARMS = ("ddp", "sliced", "leaders")
PROMISED = 0.08
_STEPS, _BLOCKS, _WARM = 4, 3, 5


def rank_main(_: str, quick: bool) -> None:
    """Count the bytes; rank 0 tells."""
    from arms import Blocks, Trainer, ranks, timed
    from scaling import small_work
    from tacit.strategy import Strategy
    from tacit.topologies import Hierarchical

    strategies: dict[str, Any] = {
        "sliced": Strategy(topology=Hierarchical(by="slices"), name="sliced"),
        "leaders": Strategy(topology=Hierarchical(by="leaders"), name="leaders"),
    }
    with ranks() as rank:
        trainers = {arm: Trainer(strategies.get(arm, arm), work=small_work()) for arm in ARMS}
        for each in trainers.values():
            each.steps(_WARM)
        blocks = {arm: Blocks(each, _STEPS) for arm, each in trainers.items()}
        timed(blocks, 1 if quick else _BLOCKS)
        if rank == 0:
            numel = sum(p.numel() for p in trainers["ddp"].model.parameters())
            tell({"megabytes": {arm: each.megabytes for arm, each in blocks.items()}, "numel": numel})
        for each in trainers.values():
            each.close()


def rows(quick: bool, script: str) -> list[dict[str, Any]]:
    """A row an arm. `script`: what calls `rank_main` in a rank."""
    words = [script, "--only", "slices", "--rank", "all", *(["--quick"] if quick else [])]
    told = in_testbed(CLUSTER, words, timeout=600)
    gradient = 4 * told["numel"] / 1e6
    found = [
        {"arm": arm, "megabytes": told["megabytes"][arm], "gradients": told["megabytes"][arm] / gradient}
        for arm in ARMS
    ]
    for row in found:
        print(
            f"{row['arm']:8} {row['megabytes']:.2f} MB out of a node, {row['gradients']:.3f} gradients",
            file=sys.stderr,
        )
    return found


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many gradients leave a node where its ranks share them out."""
    (out,) = (row["gradients"] for row in found if row["arm"] == "sliced")
    return [{"what": "sliced: gradients out of a node", "is": out, "met": 1 <= out <= 1 + PROMISED}]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows, as the documents show them."""
    head = ["| arm | MB out of a node | gradients |", "|---|---:|---:|"]
    lines = [f"| `{row['arm']}` | {row['megabytes']:.2f} | {row['gradients']:.3f} |" for row in found]
    return "\n".join([*head, *lines])
