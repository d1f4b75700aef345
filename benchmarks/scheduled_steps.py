"""In which order and messages gradients leave: steps of DDP, fusion, priority and DeAR, side by side.

`python benchmarks/order.py --only scheduled` runs it. On 4x1@1gbit, dense in fp32: a VGG-11 of 9.2 million
parameters, and a byte transformer of 0.7 million. All arms do DDP's arithmetic. Promised: of what DDP takes
beyond computing alone, fusion and priority remove at least half. `limit` is the larger of computing alone and
the bytes of a ring over the link's rate. Four ranks on two cores take longer, as Gloo's and the kernel's work
takes processor time from computing: `busy` is for how long each core was at work in a step.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launched import in_testbed, tell
from paired import Ticks

CLUSTER = "4x1@1gbit"
MODELS = ("vgg11", "bytes")
ARMS = ("ddp", "dense", "fusion", "priority", "priority:megabytes=10", "dear")
JUDGED = ("fusion", "priority")
PROMISED = 0.5
_STEPS, _BLOCKS, _WARM = 6, 5, 18


def rank_main(model: str, quick: bool) -> None:
    """Time the arms; rank 0 tells."""
    from arms import Blocks, Trainer, ranks, timed
    from foresight import _work

    with ranks() as rank:
        trainers = {arm: Trainer(arm, work=_work(model)) for arm in ("compute-only", *ARMS)}
        for each in trainers.values():
            each.steps(_WARM)  # plans are made behind the eighth step, and once more five steps later
        blocks = {arm: Blocks(each, _STEPS) for arm, each in trainers.items()}
        seconds = timed(blocks, 2 if quick else _BLOCKS)
        busy = {arm: _busy(each) for arm, each in trainers.items()}
        if rank == 0:
            sizes = {
                arm: [bucket.numel * 4 / 1e6 for bucket in each.session.session.buckets]
                for arm, each in trainers.items()
                if each.session is not None
            }
            parameters = sum(p.numel() for p in trainers["ddp"].model.parameters())
            megabytes = {arm: each.megabytes for arm, each in blocks.items()}
            told = {"seconds": seconds, "busy": busy, "sizes": sizes}
            tell({**told, "bytes": 4 * parameters, "megabytes": megabytes})
        for each in trainers.values():
            each.close()


def _busy(trainer: Any) -> float:
    """Seconds a step for which each core was at work, on average: what it would take if none ever waited."""
    import torch.distributed as dist

    dist.barrier()
    before = Ticks.now()
    trainer.steps(_STEPS)
    dist.barrier()
    return (Ticks.now() - before).busy / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1) / _STEPS


def rows(quick: bool, script: str) -> list[dict[str, Any]]:
    """A row a model and arm. `script`: what calls `rank_main` in a rank."""
    return [row for model in MODELS[: 1 if quick else None] for row in _of(model, quick, script)]


def _of(model: str, quick: bool, script: str) -> list[dict[str, Any]]:
    words = [script, "--only", "scheduled", "--rank", model, *(["--quick"] if quick else [])]
    found = in_testbed(CLUSTER, words, timeout=900)
    ms = {arm: [1e3 * each for each in blocks] for arm, blocks in found["seconds"].items()}
    alone = statistics.median(ms["compute-only"])
    ring = 1e3 * 1.5 * found["bytes"] / 125e6
    rows = []
    for arm in ARMS:
        removed = [
            (ddp - ours) / (ddp - computing)
            for ddp, ours, computing in zip(ms["ddp"], ms[arm], ms["compute-only"], strict=True)
        ]
        rows.append(
            {
                "model": model,
                "cluster": CLUSTER,
                "arm": arm,
                "ms": statistics.median(ms[arm]),
                "blocks_ms": ms[arm],
                "compute_only_ms": alone,
                "ring_ms": ring,
                "limit_ms": max(alone, ring),
                "busy_ms": 1e3 * found["busy"][arm],
                "removed": statistics.median(removed),
                "messages_mb": found["sizes"].get(arm, []),
                "interface_mb": found["megabytes"][arm],
            }
        )
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['model']:6} {row['arm']:30} {row['ms']:7.1f} ms, computing {row['compute_only_ms']:.1f}, "
        f"limit {row['limit_ms']:.1f}, cores at work {row['busy_ms']:.1f}; "
        f"{100 * row['removed']:.0f} % of DDP's waiting removed; "
        f"{len(row['messages_mb'])} messages"
    )


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What share of DDP's waiting is removed."""
    return [
        {
            "what": f"{row['model']}, {row['arm']}: of DDP's waiting removed",
            "is": row["removed"],
            "met": row["removed"] >= PROMISED,
        }
        for row in found
        if row["arm"] in JUDGED
    ]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows, as the documents show them."""
    head = [
        "| model | arm | ms a step | cores at work | of DDP's (step - computing) removed | over the limit |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines = [
        f"| {row['model']} | `{row['arm']}` | {row['ms']:.0f} | {row['busy_ms']:.0f} | "
        f"{100 * row['removed']:.0f} % | "
        f"{row['ms'] / row['limit_ms']:.2f} × |"
        for row in found
    ]
    return "\n".join([*head, *lines])
