"""What a step with compression leaves of pure computing: time, and processor time beyond computing.

Part of `overhead.py` (`--only lean`: all scenes, about 35 minutes; `--only lean-small`: one of them). All
arms of a scene are interleaved in blocks of steps, one thread a rank, fp32, DDP's bucket views on. What is
under way when a block ends is waited for behind its time, so that a block is steps in the middle of training;
its bytes and its processor time count. `noop` is DDP with a hook that exchanges nothing.

`limit` is the longer of computing and of the bytes at the link's rate: no step that sends these bytes can be
shorter. Processor time is that of all threads of a rank.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import process_time
from typing import TYPE_CHECKING, Any

from launched import in_testbed, tell
from paired import Ticks, paired_ratio
from runs import COMPUTE_ONLY, FOREVER

if TYPE_CHECKING:
    from arms import Trainer, Work

NAME = "lean"
LIMIT = "limit"
CYCLING = (1, FOREVER)
"""An epoch that does not end: DASO cycles all the time."""
DASO = "daso:period=auto,bits=16,by=slices,warmup_epochs=0,cooldown_epochs=0"
SMALL = ("bf16", "topk", "powersgd", "dgc", "efsign", "int8")
"""What a small model is trained with."""


@dataclass(frozen=True)
class Promise:
    """What is wanted of an arm.

    Attributes:
        share: a step of `against` takes at least this share of one of the arm.
        cpu_ms: processor time of a rank and step beyond computing, at most.
    """

    share: float | None = None
    against: str = COMPUTE_ONLY
    cpu_ms: float | None = None


@dataclass(frozen=True)
class Scene:
    """One run.

    Attributes:
        arms: what is attached -> steps in a block; whole periods. Behind an @: DDP's `bucket_cap_mb`.
        promises: arm -> what is wanted of it.
        blocks: counted ones.
        warmup: steps of each arm first.
    """

    cluster: str
    model: str
    arms: Mapping[str, int]
    promises: Mapping[str, Sequence[Promise]] = field(default_factory=dict)
    blocks: int = 10
    warmup: int = 4


SCENES = {
    "lean-slow": Scene(
        "4x1@100mbit",
        "vgg11",
        {
            COMPUTE_ONLY: 8,
            "noop": 8,
            "ddp": 1,
            "bf16": 1,
            "topk": 8,
            "topk@10": 8,
            "topk:values=int8@10": 8,
            "dgc": 8,
            "powersgd": 8,
            "powersgd@10": 8,
            "powersgd@1024": 8,
            "efsign": 8,
            "efsign@10": 8,
            "int8": 4,
            "lowbit:sync_every=2,late=1": 16,
            "lowbit:sync_every=2,late=1@10": 16,
        },
        {
            "bf16": [Promise(cpu_ms=12)],
            "topk": [Promise(cpu_ms=18)],
            "topk:values=int8@10": [Promise(0.90)],
            "dgc": [Promise(0.90), Promise(cpu_ms=18)],
            "powersgd": [Promise(cpu_ms=20)],
            "powersgd@10": [Promise(0.87)],
            "efsign": [Promise(1 / 1.1, LIMIT)],
            "efsign@10": [Promise(0.84)],
            "int8": [Promise(1 / 1.1, LIMIT)],
            "lowbit:sync_every=2,late=1@10": [Promise(0.93)],
        },
    ),
    "lean-periods": Scene(
        "4x1@100mbit",
        "vgg11",
        {
            COMPUTE_ONLY: 8,
            "streaming-diloco": 32,
            "diloco": 32,
            "diloco:bits=8": 32,
            "diloco:sync_every=128": 128,
        },
        {
            "streaming-diloco": [Promise(0.97)],
            "diloco": [Promise(0.90)],
            "diloco:bits=8": [Promise(0.90)],
        },
        blocks=5,
    ),
    "lean-nodes": Scene(
        "2x2@100mbit",
        "vgg11",
        {COMPUTE_ONLY: 8, "near-only": 8, DASO: 32},
        {DASO: [Promise(0.95, "near-only")]},
        blocks=6,
        warmup=14,  # until the period is chosen
    ),
    "lean-fast": Scene(
        "4x1@1gbit",
        "vgg11",
        {
            COMPUTE_ONLY: 6,
            "noop": 6,
            "ddp": 4,
            "topk": 6,
            "powersgd": 6,
            "powersgd@1024": 6,
            "dgc": 6,
            "int8": 6,
        },
        {"topk": [Promise(0.95)], "powersgd": [Promise(0.95)]},
    ),
    "lean-small": Scene(
        "4x1@1gbit",
        "resnet20",
        {COMPUTE_ONLY: 12, "noop": 12, "ddp": 12} | dict.fromkeys(SMALL, 12),
        {arm: [Promise(0.90), Promise(1.0, "ddp")] for arm in SMALL},
    ),
    "lean-dense": Scene(
        "4x1",
        "vgg11",
        {COMPUTE_ONLY: 4, "ddp": 4, "dense": 4},
        {"dense": [Promise(1 / 1.01, "ddp")]},
        blocks=20,
    ),
}


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(name: str, quick: bool) -> None:
    """Measure all arms of a scene; rank 0 prints the result."""
    import torch.distributed as dist

    from arms import on_all_ranks, ranks
    from paired import Arm

    scene = SCENES[name]
    with ranks() as rank:
        blocks = {
            arm: Steady(_trainer(arm, scene.model), min(steps, 4) if quick else steps)
            for arm, steps in scene.arms.items()
        }
        for each in blocks.values():
            for _ in range(scene.warmup):  # buckets settle in the fourth round
                each.trainer.step()

        def fence() -> None:
            for each in blocks.values():
                each.settle()
            dist.barrier()

        before = Ticks.now()
        arms = {text: Arm(each.take, 1, 0) for text, each in blocks.items()}
        seconds = on_all_ranks(arms, 2 if quick else scene.blocks, fence)
        fence()
        if rank == 0:
            withheld = (Ticks.now() - before).withheld
            tell(
                {
                    "withheld": withheld,
                    "arms": {
                        text: {
                            "seconds": [each / blocks[text].steps for each in seconds[text]],
                            "cpu": blocks[text].cpu,
                            "bytes": blocks[text].sent,
                        }
                        for text in scene.arms
                    },
                }
            )
        for each in blocks.values():
            each.trainer.close()


def _trainer(arm: str, model: str) -> Trainer:
    from arms import Trainer

    text, _, cap = arm.partition("@")
    return Trainer(text, bucket_cap_mb=float(cap) if cap else None, epochs=CYCLING, work=_work(model))


@dataclass
class Steady:
    """Blocks of an arm's steps, as they are in the middle of training.

    Attributes:
        steps: of a block.
        cpu: processor seconds a step, of each block that has settled.
        sent: bytes a step that this node's interface has sent, of each of them.
        began: what the block that has not settled began at: processor seconds, and bytes.
    """

    trainer: Trainer
    steps: int
    cpu: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    began: tuple[float, int] | None = None

    def take(self) -> None:
        """One block; what is under way at its end stays so."""
        self.began = process_time(), _sent()
        for _ in range(self.steps):
            self.trainer.step()

    def settle(self) -> None:
        """Wait for what the last block has left under way, and count it."""
        if self.began is None:
            return
        if self.trainer.session is not None:
            self.trainer.session.flush()
        cpu, sent = self.began
        self.cpu.append((process_time() - cpu) / self.steps)
        self.sent.append((_sent() - sent) / self.steps)
        self.began = None


def _sent() -> int:
    from tacit_lab.testbed.network import counters

    return counters.transmitted(os.environ["TACIT_INTERFACE"])


def _work(model: str) -> Work | None:
    """None: the VGG-11 that trainers have by themselves."""
    import torch
    from torch import nn

    from arms import BATCH, Work, momentum_sgd
    from tacit_lab.recipes import models

    if model == "vgg11":
        return None
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    return Work(
        models.build(model, channels=3, classes=10), momentum_sgd, lambda: (x, y), nn.CrossEntropyLoss()
    )


# ---- outside ------------------------------------------------------------------------------------------


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """Run a scene in the testbed; one row an arm."""
    scene = SCENES[name]
    words = [os.path.abspath(__file__), "--rank", name, *(["--quick"] if quick else [])]
    return rows(name, in_testbed(scene.cluster, words))


def rows(name: str, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a scene's ranks have told, a row an arm."""
    from tacit_lab.cluster import Cluster

    scene, found = SCENES[name], told["arms"]
    rate = Cluster.parse(scene.cluster).rate
    seconds = {arm: each["seconds"] for arm, each in found.items()}
    computing = found[COMPUTE_ONLY]
    made = []
    for arm, each in found.items():
        link = 8 * statistics.mean(each["bytes"]) / rate if rate else 0.0
        compared = seconds | {LIMIT: [max(block, link) for block in seconds[COMPUTE_ONLY]]}
        pairs = zip(each["cpu"], computing["cpu"], strict=True)
        beyond = statistics.median(1e3 * (mine - alone) for mine, alone in pairs)
        promises = [_kept(promise, arm, compared, beyond) for promise in scene.promises.get(arm, ())]
        made.append(
            {
                "scene": name,
                "cluster": scene.cluster,
                "model": scene.model,
                "arm": arm,
                "blocks": len(seconds[arm]),
                "step_ms": 1e3 * statistics.median(seconds[arm]),
                "shares": {
                    other: paired_ratio(compared[other], seconds[arm])
                    for other in (COMPUTE_ONLY, "ddp", "near-only", LIMIT)
                    if other in compared and other != arm
                },
                "cpu_ms": 1e3 * statistics.median(each["cpu"]),
                "cpu_beyond_ms": beyond,
                "mb_per_step_and_node": statistics.mean(each["bytes"]) / 1e6,
                "link_ms": 1e3 * link,
                "withheld": told["withheld"],
                "promises": promises,
            }
        )
    return made


def _kept(promise: Promise, arm: str, seconds: Mapping[str, list[float]], beyond_ms: float) -> dict[str, Any]:
    if promise.cpu_ms is not None:
        return {
            "what": "cpu beyond computing, ms",
            "promised": promise.cpu_ms,
            "found": beyond_ms,
            "met": beyond_ms <= promise.cpu_ms,
        }
    assert promise.share is not None
    found = paired_ratio(seconds[promise.against], seconds[arm])["median"]
    return {
        "what": f"of {promise.against}",
        "promised": promise.share,
        "found": found,
        "met": found >= promise.share,
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = []
    for name in dict.fromkeys(row["scene"] for row in found):
        mine = [row for row in found if row["scene"] == name]
        first = mine[0]
        lines += [
            f"{name}: {first['model']} on {first['cluster']}, {first['withheld']:.1%} of the time withheld",
            f"  {'arm':24} {'step ms':>8} {'of computing':>20} {'of ddp':>7} {'MB/step':>8} {'link ms':>8} "
            f"{'CPU +ms':>8}  promised: found",
        ]
        lines += [_line(row) for row in mine]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    share, ddp = row["shares"].get(COMPUTE_ONLY), row["shares"].get("ddp")
    of_computing = f"{share['median']:.3f} ({share['q1']:.2f}-{share['q3']:.2f})" if share else "-"
    promises = [
        f"{each['what']} {each['promised']:.3g}: {each['found']:.3f} {'met' if each['met'] else 'MISSED'}"
        for each in row["promises"]
    ]
    return (
        f"  {row['arm'][:24]:24} {row['step_ms']:8.1f} {of_computing:>20} "
        f"{'-' if ddp is None else format(ddp['median'], '.2f'):>7} {row['mb_per_step_and_node']:8.2f} "
        f"{row['link_ms']:8.1f} {row['cpu_beyond_ms']:8.1f}  " + "; ".join(promises)
    ).rstrip()


if __name__ == "__main__":
    rank_main(sys.argv[sys.argv.index("--rank") + 1], "--quick" in sys.argv)
