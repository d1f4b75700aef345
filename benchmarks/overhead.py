"""What the machinery costs, and what it saves: step times of VGG-11, all arms interleaved in one run.

    python benchmarks/overhead.py            # about 6 minutes
    python benchmarks/overhead.py --quick    # under 2 minutes
    python benchmarks/overhead.py --json     # the last line on stdout is one JSON object

Two experiments: `dense` against plain DDP on links that are not shaped (the machinery's own cost), and
compression against plain DDP on links of 100 Mbit/s. Every arm has DDP's bucket views on. The arm
`compute-only` is the same model without DDP on the same number of ranks: the limit that no algorithm beats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from paired import Arm, hardware, interleave, paired_ratio, save

BATCH = 32
MARK = "RESULT "


@dataclass(frozen=True)
class Experiment:
    """A cluster, the arms on it, and how long to measure.

    Attributes:
        arms: name -> steps in a block; compute-only is always measured too.
        bars: arm -> the least step-time ratio ddp / arm that is promised.
        blocks: counted blocks; with --quick, `quick` blocks of one step.
    """

    cluster: str
    arms: Mapping[str, int]
    bars: Mapping[str, float]
    blocks: int
    quick: int


EXPERIMENTS = {
    "unshaped": Experiment("4x1", {"ddp": 3, "dense": 3}, {"dense": 1 / 1.03}, blocks=20, quick=6),
    "shaped": Experiment(
        "4x1@100mbit",
        {"ddp": 1, "bf16": 1, "topk:ratio=0.01": 3},
        {"bf16": 1.8, "topk:ratio=0.01": 5.0},
        blocks=12,
        quick=2,
    ),
}


# ---- in a rank ----------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer and an algorithm; one arm."""

    def __init__(self, algorithm: str) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import tacit
        from tacit.recipes.vgg import vgg11

        torch.manual_seed(0)
        self.model: torch.nn.Module = vgg11()
        self.session = None
        if algorithm != "compute-only":
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if algorithm != "compute-only":
            self.session = tacit.attach(self.model, self.optimizer, algorithm)
        self.x = torch.randn(BATCH, 3, 32, 32)
        self.y = torch.randint(0, 10, (BATCH,))
        self.criterion = torch.nn.CrossEntropyLoss()
        self.sent: list[int] = []
        self.exposed: list[float] = []

    def step(self) -> None:
        """One step of the user's loop."""
        before = _transmitted()
        loss = self.criterion(self.model(self.x), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.sent.append(_transmitted() - before)
        if self.session is not None and self.session.session.records:
            self.exposed.append(self.session.session.records[-1].exposed_seconds)


def _transmitted() -> int:
    from tacit.testbed import counters

    return counters.transmitted(os.environ["TACIT_INTERFACE"])


def rank_main(name: str, quick: bool) -> None:
    """Measure all arms of an experiment; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    experiment = EXPERIMENTS[name]
    trainers = {arm: Trainer(arm) for arm in ("compute-only", *experiment.arms)}
    steps = dict.fromkeys(trainers, 1) if quick else {"compute-only": 3, **experiment.arms}
    blocks = experiment.quick if quick else experiment.blocks
    # Lots settle in the fourth round; what has none is warm sooner, and ddp's steps are long.
    warmup = {"compute-only": 1, "ddp": 1} if quick else {"ddp": 2}
    arms = {arm: Arm(trainer.step, steps[arm], warmup.get(arm, 4)) for arm, trainer in trainers.items()}
    seconds = interleave(arms, blocks, dist.barrier)
    if dist.get_rank() == 0:
        detail = {
            arm: {
                "seconds": seconds[arm],
                "mb_per_step": statistics.median(trainer.sent) / 1e6,
                "exposed_seconds": statistics.median(trainer.exposed) if trainer.exposed else None,
            }
            for arm, trainer in trainers.items()
        }
        print(MARK + json.dumps(detail), flush=True)
    for trainer in trainers.values():
        if trainer.session is not None:
            trainer.session.close()
    dist.destroy_process_group()


# ---- outside ------------------------------------------------------------------------------------------


def measure(name: str, quick: bool) -> list[dict[str, object]]:
    """Run one experiment in the testbed; one row an arm."""
    from tacit.cluster import Cluster
    from tacit.testbed import Testbed

    experiment = EXPERIMENTS[name]
    found: list[dict[str, dict[str, object]]] = []

    def listen(node: int, line: str) -> None:
        if line.startswith(MARK):
            found.append(json.loads(line.removeprefix(MARK)))
        else:
            print(f"node {node}: {line}", file=sys.stderr)

    with Testbed(Cluster.parse(experiment.cluster)) as bed:
        result = bed.run([__file__, "--rank", name, *(["--quick"] if quick else [])], on_line=listen)
    if result.returncode or not found:
        raise SystemExit(f"{name} failed: {result.failures}")
    return [_row(name, arm, found[0]) for arm in found[0]]


def _row(name: str, arm: str, found: Mapping[str, dict[str, object]]) -> dict[str, object]:
    experiment = EXPERIMENTS[name]
    seconds, ddp, compute = (list(_floats(found[a]["seconds"])) for a in (arm, "ddp", "compute-only"))
    megabytes = float(str(found[arm]["mb_per_step"]))
    ratio, share = paired_ratio(ddp, seconds), paired_ratio(compute, seconds)
    return {
        "experiment": name,
        "cluster": experiment.cluster,
        "arm": arm,
        "blocks": len(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
        "speedup_over_ddp": ratio,
        "of_compute_only": share,
        "mb_per_step_and_node": megabytes,
        "link_ms": megabytes * 8 / 100 * 1e3 if "100mbit" in experiment.cluster else None,
        "exposed_ms": 1e3 * float(str(found[arm]["exposed_seconds"]))
        if found[arm]["exposed_seconds"]
        else None,
        "bar": experiment.bars.get(arm),
        "met": ratio["median"] >= experiment.bars[arm] if arm in experiment.bars else None,
    }


def _floats(values: object) -> Sequence[float]:
    assert isinstance(values, list)
    return values


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as text."""
    lines = [
        f"{'cluster':12} {'arm':16} {'step ms':>8} {'ddp / arm':>20} {'of compute':>10} {'MB/step':>8} "
        f"{'link ms':>8} {'exposed':>8}  promised"
    ]
    for row in rows:
        ratio, share = row["speedup_over_ddp"], row["of_compute_only"]
        assert isinstance(ratio, dict)
        assert isinstance(share, dict)
        promise = f"{row['bar']:.3f} {'met' if row['met'] else 'MISSED'}" if row["bar"] else ""
        lines.append(
            f"{row['cluster']:12} {row['arm']:16} {row['step_ms']:8.0f} "
            f"{ratio['median']:8.3f} ({ratio['q1']:.2f}-{ratio['q3']:.2f}) {share['median']:10.3f} "
            f"{row['mb_per_step_and_node']:8.2f} {_ms(row['link_ms'])} {_ms(row['exposed_ms'])}  {promise}"
        )
    return "\n".join(lines)


def _ms(value: object) -> str:
    return f"{value:8.0f}" if isinstance(value, float) else f"{'-':>8}"


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks: under 2 minutes")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-overhead.json")
    parser.add_argument("--only", choices=list(EXPERIMENTS), help="one experiment alone")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.quick)
        return
    rows = [
        row for name in EXPERIMENTS if options.only in (None, name) for row in measure(name, options.quick)
    ]
    result = {"benchmark": "overhead", "quick": options.quick, "hardware": hardware(), "rows": rows}
    print(table(rows), file=sys.stderr if options.json else sys.stdout)
    if options.quick:
        print("quick: too few blocks to judge by; the full run decides", file=sys.stderr)
    if options.save:
        print(f"saved {save('overhead', result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
