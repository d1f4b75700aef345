"""What the machinery costs, and what it saves: step times of VGG-11, all arms interleaved in one run.

    python benchmarks/overhead.py            # about 45 minutes
    python benchmarks/overhead.py --quick    # about 6 minutes
    python benchmarks/overhead.py --json     # the last line on stdout is one JSON object
    python benchmarks/overhead.py --quick --only shaped --links 100mbit,30ms

Experiments, each with all its arms interleaved, on 4 nodes of 1 rank, one thread a rank:

* `unshaped`, fp32: `dense` against plain DDP (the machinery's own cost), and `closed` (a session was
  attached, took one step and was closed) against plain DDP that tacit never touched.
* `shaped`, fp32, links of 100 Mbit/s: compression against plain DDP.
* `lean`, in six scenes (`lean-slow`, ...): what compression leaves of computing alone. See `lean.py`.
* `mixed`, the same links; every arm computes in bf16 autocast with channels-last convolutions (gradients, and
  what travels, stay fp32) on 16 images a rank instead of 32: where computing alone takes a tenth of a step of
  ddp, as in fp32 on two cores, nothing can be ten times as fast. PowerSGD is also held against torch's own
  hook with error feedback and warm start; both get the single bucket that torch's hook needs on Gloo.
* `four-buckets`: does PowerSGD get through where DDP has four buckets? Not timed: ours, then torch's hook, a
  few steps each, with a time limit after which all processes are killed.

Every arm has DDP's bucket views on. The arm `compute-only` is the same model without DDP on the same number
of ranks: the limit that no algorithm beats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from experiments import LINKS
from launched import in_testbed, tell
from paired import Arm, hardware, named, paired_ratio, save
from runs import COMPUTE_ONLY


@dataclass(frozen=True)
class Promise:
    """A step of `arm` is at least `ratio` times as fast as one of `against`."""

    arm: str
    ratio: float
    against: str = "ddp"


@dataclass(frozen=True)
class Experiment:
    """A cluster, the arms on it, and how long to measure.

    Attributes:
        arms: name -> steps in a block; compute-only is always measured too.
        blocks: counted blocks; with --quick, `quick` blocks of one step.
        mixed: whether all arms compute in bf16 autocast, channels-last.
        batch: images a rank and step.
    """

    cluster: str
    arms: Mapping[str, int]
    promises: Sequence[Promise]
    blocks: int
    quick: int
    mixed: bool = False
    batch: int = 32


EXPERIMENTS = {
    "unshaped": Experiment(
        "4x1",
        {"ddp": 3, "dense": 3, "closed": 3},
        (Promise("dense", 1 / 1.03), Promise("closed", 1 / 1.03)),
        blocks=20,
        quick=4,
    ),
    "shaped": Experiment(
        "4x1@100mbit",
        {"ddp": 1, "bf16": 1, "topk:ratio=0.01": 3},
        (Promise("bf16", 1.8), Promise("topk:ratio=0.01", 5.0)),
        blocks=12,
        quick=2,
    ),
    "mixed": Experiment(
        "4x1@100mbit",
        {"ddp": 1, "sign": 2, "powersgd:rank=2": 4, "torch:powersgd": 4},
        (
            Promise("sign", 5.0),
            Promise("powersgd:rank=2", 10.0),
            Promise("powersgd:rank=2", 1.0, against="torch:powersgd"),
        ),
        blocks=12,
        quick=2,
        mixed=True,
        batch=16,
    ),
}


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(name: str, quick: bool, batch: int | None) -> None:
    """Measure all arms of an experiment; rank 0 prints the result."""
    from arms import ONE_BUCKET, Trainer, on_all_ranks, ranks

    experiment = EXPERIMENTS[name]
    images = batch or experiment.batch
    with ranks() as rank:
        trainers = {
            # torch's PowerSGD hook needs one bucket on Gloo, and ours has no other beside it.
            arm: Trainer(arm, experiment.mixed, images, ONE_BUCKET if "powersgd" in arm else None)
            for arm in (COMPUTE_ONLY, *experiment.arms)
        }
        steps = dict.fromkeys(trainers, 1) if quick else {COMPUTE_ONLY: 3, **experiment.arms}
        # Buckets settle in the fourth round; what has none is warm sooner, and ddp's steps are long.
        warmup = {COMPUTE_ONLY: 1, "ddp": 1, "closed": 1} if quick else {"ddp": 2, "closed": 2}
        arms = {arm: Arm(trainer.step, steps[arm], warmup.get(arm, 4)) for arm, trainer in trainers.items()}
        seconds = on_all_ranks(arms, experiment.quick if quick else experiment.blocks)
        if rank == 0:
            tell(
                {
                    arm: {
                        "seconds": seconds[arm],
                        "mb_per_step": statistics.median(trainer.sent) / 1e6,
                        "exposed_seconds": statistics.median(trainer.exposed) if trainer.exposed else None,
                    }
                    for arm, trainer in trainers.items()
                }
            )
        for trainer in trainers.values():
            trainer.close()


# ---- outside ------------------------------------------------------------------------------------------


def measure(name: str, quick: bool, batch: int | None, links: str = LINKS) -> list[dict[str, object]]:
    """Run one experiment in the testbed, on such links where it has some; one row an arm."""
    arguments = ["--rank", name, *(["--quick"] if quick else [])]
    arguments += [] if batch is None else ["--batch", str(batch)]
    cluster = EXPERIMENTS[name].cluster.replace(LINKS, links)
    found = in_testbed(cluster, [__file__, *arguments])
    return [_row(name, cluster, arm, found, batch) for arm in found]


def _row(
    name: str, cluster: str, arm: str, found: Mapping[str, dict[str, object]], batch: int | None
) -> dict[str, object]:
    experiment = EXPERIMENTS[name]
    seconds = {other: list(_floats(found[other]["seconds"])) for other in found}
    megabytes = float(str(found[arm]["mb_per_step"]))
    exposed = found[arm]["exposed_seconds"]
    return {
        "experiment": name,
        "cluster": cluster,
        "precision": "bf16 autocast" if experiment.mixed else "fp32",
        "batch": batch or experiment.batch,
        "arm": arm,
        "blocks": len(seconds[arm]),
        "step_ms": 1e3 * statistics.median(seconds[arm]),
        "speedup_over_ddp": paired_ratio(seconds["ddp"], seconds[arm]),
        "of_compute_only": paired_ratio(seconds[COMPUTE_ONLY], seconds[arm]),
        "mb_per_step_and_node": megabytes,
        "link_ms": megabytes * 8 / 100 * 1e3 if LINKS in cluster else None,
        "exposed_ms": 1e3 * float(str(exposed)) if exposed else None,
        "promises": [
            _kept(each, seconds)
            for each in experiment.promises
            if each.arm == arm and cluster == experiment.cluster
        ],
    }


def _kept(promise: Promise, seconds: Mapping[str, list[float]]) -> dict[str, object]:
    ratio = paired_ratio(seconds[promise.against], seconds[promise.arm])
    met = ratio["median"] >= promise.ratio
    return {"against": promise.against, "promised": promise.ratio, "ratio": ratio, "met": met}


def _floats(values: object) -> Sequence[float]:
    assert isinstance(values, list)
    return values


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as text."""
    lines = [
        f"{'cluster':26} {'computes in':13} {'batch':>5} {'arm':16} {'step ms':>8} {'ddp / arm':>20} "
        f"{'of compute':>10} {'MB/step':>8} {'link ms':>8} {'exposed':>8}  promised"
    ]
    for row in rows:
        ratio, share, promises = row["speedup_over_ddp"], row["of_compute_only"], row["promises"]
        assert isinstance(ratio, dict)
        assert isinstance(share, dict)
        assert isinstance(promises, list)
        lines.append(
            f"{row['cluster']:26} {row['precision']:13} {row['batch']:5} {row['arm']:16} "
            f"{row['step_ms']:8.0f} {ratio['median']:8.3f} ({ratio['q1']:.2f}-{ratio['q3']:.2f}) "
            f"{share['median']:10.3f} {row['mb_per_step_and_node']:8.2f} "
            f"{_ms(row['link_ms'])} {_ms(row['exposed_ms'])}  " + ", ".join(map(_promise, promises))
        )
    return "\n".join(lines)


def _promise(kept: Mapping[str, object]) -> str:
    ratio = kept["ratio"]
    assert isinstance(ratio, dict)
    verdict = "met" if kept["met"] else "MISSED"
    if kept["against"] == "ddp":
        return f"{kept['promised']:.3f} {verdict}"
    found = f"{ratio['median']:.3f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
    return f"{kept['promised']:.3f} of {kept['against']} {verdict}: {found}"


def _ms(value: object) -> str:
    return f"{value:8.0f}" if isinstance(value, float) else f"{'-':>8}"


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    import buckets
    import lean

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks: about 3 minutes")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/DATE-overhead[-ONLY].json"
    )
    parts = [*EXPERIMENTS, buckets.NAME, lean.NAME, *lean.SCENES]
    parser.add_argument("--only", choices=parts, help="one experiment alone; lean: all its scenes")
    parser.add_argument("--links", default=LINKS, help="where some are shaped, e.g. 100mbit,30ms,0.1%%loss")
    parser.add_argument("--batch", type=int, help="images a rank and step, instead of each experiment's own")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.quick, options.batch)
        return
    out = sys.stderr if options.json else sys.stdout
    rows = [
        row
        for name in EXPERIMENTS
        if options.only in (None, name)
        for row in measure(name, options.quick, options.batch, options.links)
    ]
    shares = [
        row
        for name in lean.SCENES
        if options.only in (None, lean.NAME, name)
        for row in lean.measure(name, options.quick)
    ]
    four = buckets.measure() if options.only in (None, buckets.NAME) else []
    result = {
        "benchmark": "overhead",
        "quick": options.quick,
        "hardware": hardware(),
        "rows": rows,
        "lean": shares,
        "four_buckets": [asdict(each) for each in four],
    }
    if rows:
        print(table(rows), file=out)
    if shares:
        print(lean.table(shares), file=out)
    for each in four:
        print(each, file=out)
    if options.quick:
        print("quick: too few blocks to judge by; the full run decides", file=sys.stderr)
    if options.save:
        print(f"saved {save(named('overhead', options), result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
