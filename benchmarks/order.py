"""In which order gradients leave, and in which messages: steps of DDP, fusion and priority, side by side.

    python benchmarks/order.py            # about 12 minutes
    python benchmarks/order.py --quick    # one model, about a minute
    python benchmarks/order.py --only uneven
    python benchmarks/order.py --table benchmarks/results/DATE-order.json

On 4x1@1gbit, dense in fp32: a VGG-11 of 9.2 million parameters, and a byte transformer of 0.7 million. All
arms do DDP's arithmetic. Promised: of what DDP takes beyond computing alone, fusion and priority remove at
least half. `limit` is the larger of computing alone and the bytes of a ring over the link's rate: four ranks on two
cores take longer, as Gloo's own work takes processor time from computing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import uneven_links
from launched import in_testbed, tell

CLUSTER = "4x1@1gbit"
MODELS = ("vgg11", "bytes")
ARMS = ("ddp", "dense", "fusion", "fusion:megabytes=4", "priority", "priority:megabytes=4,credit=8")
PROMISED = 0.5
_STEPS, _BLOCKS = 6, 8


def rank_main(model: str, quick: bool) -> None:
    """Time the arms; rank 0 tells."""
    from arms import Blocks, Trainer, ranks, timed
    from foresight import _work

    with ranks() as rank:
        trainers = {arm: Trainer(arm, work=_work(model)) for arm in ("compute-only", *ARMS)}
        for each in trainers.values():
            each.steps(18)  # the plan is made behind the eighth
        blocks = {arm: Blocks(each, _STEPS) for arm, each in trainers.items()}
        seconds = timed(blocks, 2 if quick else _BLOCKS)
        if rank == 0:
            sizes = {
                arm: [bucket.numel * 4 / 1e6 for bucket in each.session.session.buckets]
                for arm, each in trainers.items()
                if each.session is not None
            }
            parameters = sum(p.numel() for p in trainers["ddp"].model.parameters())
            megabytes = {arm: each.megabytes for arm, each in blocks.items()}
            tell({"seconds": seconds, "sizes": sizes, "bytes": 4 * parameters, "megabytes": megabytes})
        for each in trainers.values():
            each.close()


def rows_of(model: str, quick: bool) -> list[dict[str, Any]]:
    """A row an arm."""
    words = [__file__, "--rank", model, *(["--quick"] if quick else [])]
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
        f"limit {row['limit_ms']:.1f}; {100 * row['removed']:.0f} % of DDP's waiting removed; "
        f"{len(row['messages_mb'])} messages"
    )


def table(found: Mapping[str, Any]) -> str:
    """The committed results, as the documents show them."""
    head = [
        "| model | arm | ms a step | removed of DDP's (step - computing) | over the limit |",
        "|---|---|---:|---:|---:|",
    ]
    rows = [
        f"| {row['model']} | `{row['arm']}` | {row['ms']:.0f} | {100 * row['removed']:.0f} % | "
        f"{row['ms'] / row['limit_ms']:.2f} × |"
        for row in found["rows"]
    ]
    return "\n".join([*head, *rows])


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model, two blocks")
    parser.add_argument(
        "--only", choices=["uneven"], help="only one part: where one node of four is slow (uneven_links.py)"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write results/DATE-order.json")
    options = parser.parse_args(argv)
    if options.only == "uneven":
        if options.rank:
            uneven_links.rank_main(options.rank, options.quick)
            return
        models = [*uneven_links.CLUSTERS][: 1 if options.quick else None]
        rows = [row for model in models for row in uneven_links.rows_of(model, __file__, options.quick)]
        print(uneven_links.table(rows))
        return
    if options.rank:
        rank_main(options.rank, options.quick)
        return
    rows = [row for model in MODELS[: 1 if options.quick else None] for row in rows_of(model, options.quick)]
    print(rows and "")


if __name__ == "__main__":
    main()
