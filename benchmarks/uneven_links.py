"""Steps of DDP and of averages in unequal stretches, side by side, where one node of four is slow.

`python benchmarks/order.py --only uneven` runs it. Dense in fp32: both do the same arithmetic, but for the
order in which ranks are added up. Promised: where the link has a tenth of the rate, a step is at least 1.3
times as fast. A ring has the slow node send 1.5 times the gradient, and the stretches once, so that 1.5 is
the limit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from launched import in_testbed, tell
from tacit.topologies import Uneven

CLUSTERS = {"vgg11": "nodes=[3x1@1gbit,1x1@100mbit]", "bytes": "nodes=[3x1@100mbit,1x1@10mbit]"}
"""By model: VGG-11 of 9.2 million parameters, and a byte transformer of 0.7 million."""
ARMS = ("ddp", "dense", "uneven")
PROMISED = 1.3
_STEPS, _BLOCKS, _WARM = 2, 5, 5


def rank_main(model: str, quick: bool) -> None:
    """Time the arms; rank 0 tells."""
    from arms import Blocks, Trainer, ranks, timed
    from foresight import _work

    with ranks() as rank:
        trainers = {}
        for arm in ("compute-only", *ARMS):
            torch.manual_seed(0)  # the same model and data for all
            trainers[arm] = Trainer(arm, work=_work(model))
        for each in trainers.values():
            each.steps(_WARM)  # DDP's buckets are those of the training from then on
        blocks = {arm: Blocks(each, 1 if quick else _STEPS) for arm, each in trainers.items()}
        seconds = timed(blocks, 2 if quick else _BLOCKS)
        apart = {arm: _apart(trainers[arm], trainers["ddp"]) for arm in ARMS}
        if rank == 0:
            attached = trainers["uneven"].session
            assert attached is not None
            topology = attached.session.strategy.topology
            assert isinstance(topology, Uneven)
            tell(
                {
                    "seconds": seconds,
                    "apart": apart,
                    "rates": [rate / 1e6 for rate in topology.rates],
                    "bytes": 4 * sum(p.numel() for p in trainers["ddp"].model.parameters()),
                    "megabytes": {arm: each.megabytes for arm, each in blocks.items()},
                }
            )
        for each in trainers.values():
            each.close()


def _apart(ours: Any, theirs: Any) -> float:
    """The largest difference between two models' parameters."""
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def rows(quick: bool, script: str) -> list[dict[str, Any]]:
    """A row a model and arm. `script`: what calls `rank_main` in a rank."""
    return [row for model in [*CLUSTERS][: 1 if quick else None] for row in _of(model, script, quick)]


def _of(model: str, script: str, quick: bool) -> list[dict[str, Any]]:
    words = [script, "--only", "uneven", "--rank", model, *(["--quick"] if quick else [])]
    found = in_testbed(CLUSTERS[model], words, timeout=900)
    ms = {arm: [1e3 * each for each in blocks] for arm, blocks in found["seconds"].items()}
    rows = []
    for arm in ARMS:
        faster = [ddp / ours for ddp, ours in zip(ms["ddp"], ms[arm], strict=True)]
        rows.append(
            {
                "model": model,
                "cluster": CLUSTERS[model],
                "arm": arm,
                "ms": statistics.median(ms[arm]),
                "blocks_ms": ms[arm],
                "compute_only_ms": statistics.median(ms["compute-only"]),
                "times_ddp": statistics.median(faster),
                "interface_mb": found["megabytes"][arm],
                "apart_from_ddp": found["apart"][arm],
                "rates_mbit": found["rates"],
            }
        )
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['model']:6} {row['arm']:8} {row['ms']:8.1f} ms, computing {row['compute_only_ms']:.1f}; "
        f"{row['times_ddp']:.2f} x ddp's speed; parameters differ by {row['apart_from_ddp']:.1e}"
    )


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast as DDP a step is."""
    return [
        {
            "what": f"{row['model']}, uneven: times ddp",
            "is": row["times_ddp"],
            "met": row["times_ddp"] >= PROMISED,
        }
        for row in found
        if row["arm"] == "uneven"
    ]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows, as the documents show them."""
    head = ["| cluster | model | arm | ms a step | × DDP |", "|---|---|---|---:|---:|"]
    return "\n".join(
        [
            *head,
            *(
                f"| `{row['cluster']}` | {row['model']} | `{row['arm']}` | {row['ms']:.0f} | "
                f"{row['times_ddp']:.2f} |"
                for row in found
            ),
        ]
    )
