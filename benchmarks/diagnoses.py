"""Whether a diagnosis names what makes a training slow: runs with one known cause each, on real ranks.

    python benchmarks/diagnoses.py            # about 6 minutes
    python benchmarks/diagnoses.py --quick    # three of them, a minute
    python benchmarks/diagnoses.py --table benchmarks/results/DATE-diagnoses.json

Each run trains a network of 1.8 million parameters under DDP with one thing wrong, and is looked at by
`tacit diagnose`. The cause is named if its finding is there, with the rank or node where it has one. It is
first if no other cause costs more; that another strategy would be faster ("links", "encoding") is advice, and
no other cause. The last run has nothing wrong: a cause of a tenth of its step and more is a false alarm.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paired import add_table, conclude, hardware

STEPS = 20
_BATCH, _SIDE = 128, 512
_ADVICE = ("links", "encoding")
"""What says that another strategy would be faster."""
_ALARM = 0.1
"""A finding of such a share of a step, where nothing is wrong, is a false alarm."""


@dataclass(frozen=True)
class Stage:
    """A run with one thing wrong.

    Attributes:
        cause: the kind of finding that names it; "" where nothing is wrong.
        cluster: on which it runs; links are fast enough unless they are what is wrong.
        says: words that the finding must have, such as the rank's number.
        algorithm: attached by the script; "ddp" without tacit.
        threads: of a rank.
    """

    cause: str
    cluster: str = "2x1@10gbit"
    says: str = ""
    algorithm: str = "ddp"
    threads: int = 1


STAGES = {
    "one rank computes more": Stage("slow rank", "4x1@10gbit", "rank 2 "),
    "one link is slow": Stage("slow link", "nodes=[3x1@400mbit,1x1@40mbit]", "node 3"),
    "the loader is slow": Stage("data loader"),
    "one rank's loader is slow": Stage("data loader", says="rank 1 "),
    "work between steps": Stage("data loader"),
    "tiny buckets": Stage("small buckets"),
    "a ring over the slow axis": Stage("flat ring", "2x2@100mbit"),
    "three threads a rank": Stage("threads", threads=3),
    "a search for unused parameters": Stage("unused parameters"),
    "no bucket views": Stage("bucket views"),
    "slow links": Stage("links", "4x1@50mbit"),
    "a costly code": Stage("encoding", algorithm="powersgd:rank=128"),
    "nothing": Stage(""),
}
QUICK = ("one rank computes more", "the loader is slow", "nothing")


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(name: str) -> None:
    """Train, with what is wrong; the diagnosis ends it."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import tacit

    stage = STAGES[name]
    torch.set_num_threads(stage.threads)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = [_SIDE, 1024, 1024, 256, 10]
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    network = nn.Sequential(*layers[:-1])
    model = DistributedDataParallel(
        network,
        bucket_cap_mb=0.002 if name == "tiny buckets" else 25,
        find_unused_parameters=name == "a search for unused parameters",
        gradient_as_bucket_view=name != "no bucket views",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if stage.algorithm != "ddp":
        tacit.attach(model, optimizer, stage.algorithm)
    for x, y in _batches(name, dist.get_rank()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        for _ in range(2 if name == "one rank computes more" and dist.get_rank() == 2 else 0):
            torch.mm(torch.ones(1024, 1024), torch.ones(1024, 1024))
        torch.autograd.backward(loss)
        optimizer.step()
        if name == "work between steps":
            torch.fft.fft2(torch.ones(700, 700))
    dist.destroy_process_group()


def _batches(name: str, rank: int) -> Iterator[tuple[Any, Any]]:
    import torch
    from torch.utils.data import DataLoader

    slow = name == "the loader is slow" or (name == "one rank's loader is slow" and rank == 1)
    x, y = torch.randn(_BATCH, _SIDE), torch.randint(0, 10, (_BATCH,))

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> Any:
            if slow:
                time.sleep(0.1)
            return x, y

    workers = 1 if slow else 0
    yield from DataLoader(Data(), batch_size=None, num_workers=workers)


# ---- outside ------------------------------------------------------------------------------------------


def diagnose(name: str) -> dict[str, Any]:
    """Run a stage, and judge what was found."""
    from tacit_lab import diagnoses
    from tacit_lab.cluster import Cluster

    stage = STAGES[name]
    words = [__file__, "--rank", name]
    lines: list[str] = []
    found = diagnoses.of_script(
        Cluster.parse(stage.cluster), words, steps=STEPS, on_line=lambda _, line: lines.append(line)
    )
    findings = [{"kind": each.kind, "says": each.says, "ms": 1e3 * each.seconds} for each in found.findings]
    row = {
        "name": name,
        "cause": stage.cause,
        "cluster": stage.cluster,
        "step_ms": 1e3 * found.seconds,
        "parts_ms": {part: 1e3 * seconds for part, seconds in found.parts.items()},
        "limit_ms": 1e3 * found.limit,
        "findings": findings,
        **judged(stage, findings, 1e3 * found.seconds),
    }
    print(_line(row), file=sys.stderr, flush=True)
    return row


def judged(stage: Stage, findings: list[dict[str, Any]], step: float) -> dict[str, bool]:
    """Whether the cause was named, and came first; of a run with nothing wrong, whether all is quiet."""
    if not stage.cause:
        quiet = all(each["ms"] < _ALARM * step for each in findings if each["kind"] not in _ADVICE)
        return {"named": quiet, "first": quiet}
    mine = [each for each in findings if each["kind"] == stage.cause and stage.says in each["says"]]
    others = [
        each["ms"]
        for each in findings
        if each["kind"] != stage.cause and (each["kind"] not in _ADVICE or stage.cause in _ADVICE)
    ]
    return {"named": bool(mine), "first": bool(mine) and mine[0]["ms"] >= max(others, default=0.0)}


def _line(row: Mapping[str, Any]) -> str:
    said = "quiet" if row["named"] else "FALSE ALARM"
    if row["cause"]:
        said = "first" if row["first"] else "named" if row["named"] else "MISSED"
    kinds = ", ".join(f"{each['kind']} {each['ms']:.1f}" for each in row["findings"]) or "-"
    return f"{row['name']:34}{row['cluster']:34}{row['step_ms']:9.1f}  {said:13}{kinds}"


def table(result: Mapping[str, Any]) -> str:
    """All of it as text."""
    rows = result["rows"]
    causes = [row for row in rows if row["cause"]]
    head = f"{'wrong':34}{'cluster':34}{'step ms':>9}  {'':13}found, ms of a step"
    return "\n".join(
        [
            head,
            *map(_line, rows),
            "",
            f"named: {sum(row['named'] for row in causes)} of {len(causes)}; first: "
            f"{sum(row['first'] for row in causes)}",
        ]
    )


def main() -> None:
    """Run the stages, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three runs only")
    parser.add_argument("--only", help="these runs, with commas, e.g. 'tiny buckets,slow links'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-diagnoses.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    add_table(parser)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank)
    elif options.table is not None:
        print(table(options.table))
    else:
        names = options.only.split(",") if options.only else QUICK if options.quick else STAGES
        rows = [diagnose(name) for name in names]
        result = {"benchmark": "diagnoses", "hardware": hardware(), "rows": rows}
        conclude(result, table(result), options)


if __name__ == "__main__":
    main()
