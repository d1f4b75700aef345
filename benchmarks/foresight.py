"""How well steps are foretold: predictions of the planner against the testbed, on many configurations.

    python benchmarks/foresight.py            # about 20 minutes
    python benchmarks/foresight.py --quick    # one model on one cluster, about a minute
    python benchmarks/foresight.py --late     # both models where links have latency, about 15 minutes
    python benchmarks/foresight.py --table benchmarks/results/DATE-foresight.json

Two models (VGG-11 of 9.2 million parameters, a byte transformer of 0.7 million) on four clusters, one of them
with a node whose link has a third of the others' rate. On each, all ranks profile 12 steps that send nothing,
measure the links, and what each strategy's own work costs; then the arms are timed, their blocks interleaved.
The predictions are made outside, from the profile and the links alone.

Half of the configurations were not looked at while the model of time was written: those that `held_out` draws
from all but the ones of `BUILT_ON`, by a seed that was written down before any of them was run. A first run
was on other clusters (results/2026-11-24-foresight-first.json). What it showed changed the model, and so the
clusters were replaced by some that had not been looked at.

`auto`: which arm would be chosen by the predictions among those that a user accepts, and how much longer its
measured step is than the fastest one's. The column `formula` has the closed formulas of the literature:
computing, plus 2 (P - 1) latencies and the bytes over the rate, of which rounds every K steps take a K-th.
They know no overlap, no encoding, and no cores that are shared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from typing import TYPE_CHECKING, Any

from launched import in_testbed, tell
from paired import add_table, conclude, hardware

if TYPE_CHECKING:
    from tacit.planning.profile import Profile

GRADIENTS = ("ddp", "bf16", "topk", "powersgd:rank=2", "efsign")
PERIODIC = ("localsgd:sync_every=8", "diloco:sync_every=8,bits=4")
NODES = ("ednncomm:sync_every=8",)
CLUSTERS = {
    "4x1@300mbit": (),
    "2x2@300mbit": NODES,
    "4x1@1gbit": (),
    "nodes=[3x1@1gbit,1x1@300mbit]": (),
}
LATE = {
    "4x1@100mbit,30ms": (
        *("lowbit", "lowbit:sync_every=2,late=1"),
        "streaming-diloco:sync_every=8,fragments=2,fragment_sync_delay=3",
    ),
}
"""With --late, in place of the others."""
MODELS = ("vgg11", "bytes")
BUILT_ON = (("vgg11", "4x1@1gbit"), ("bytes", "4x1@1gbit"))
"""What was looked at while the model of time was written."""
SEED = 20261124
WITHIN = (0.10, 0.25)
"""Good, and the most that is allowed."""
ACCEPT = {
    "exact": ("ddp",),
    "rounded": ("ddp", "bf16"),
    "feedback": GRADIENTS,
    "periodic": (*GRADIENTS, *PERIODIC, *NODES),
}
_PERIOD, _WARM, _BLOCKS = 8, 16, 4


def configurations() -> list[tuple[str, str, str]]:
    """(model, cluster, arm) of all."""
    return [
        (model, cluster, arm)
        for model in MODELS
        for cluster, more in CLUSTERS.items()
        for arm in (*GRADIENTS, *PERIODIC, *more)
    ]


def held_out() -> set[tuple[str, str, str]]:
    """Half of them, of those that nobody had looked at."""
    found = configurations()
    unseen = [each for each in found if each[:2] not in BUILT_ON]
    return set(random.Random(SEED).sample(unseen, len(found) // 2))


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(model: str, arms: Sequence[str], quick: bool) -> None:
    """Profile, measure the links and the costs, and time the arms; rank 0 tells."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from arms import Blocks, Trainer, ranks, timed
    from tacit.algorithms import parse
    from tacit.levels.node_layout import read_nodes
    from tacit.levels.spec import AttachSpec
    from tacit.planning.step_profiler import SKIPPED, STEPS, take
    from tacit.planning.step_timer import StepTimer
    from tacit.planning.strategy_costs import measured_cost
    from tacit.transports.probing import measure

    with ranks() as rank:
        group = dist.group.WORLD
        assert group is not None
        trainer = Trainer("noop", work=_work(model))
        replica = trainer.model
        assert isinstance(replica, DistributedDataParallel)
        module = replica.module
        timer = StepTimer(module, [trainer.optimizer], dict(module.named_parameters()))
        for _ in range(SKIPPED + STEPS + 1):
            trainer.step()
        timer.close()
        spec = AttachSpec(model=replica, optimizers=[trainer.optimizer], strategy=parse("dense"))
        profile = take(timer, spec)
        nodes = read_nodes(group, None)
        links = measure(group, nodes)
        layout = len(nodes), len(nodes[0])
        costs = [measured_cost(parse(arm), profile, *layout) for arm in arms]
        trainers = {arm: Trainer(arm, work=_work(model)) for arm in ("compute-only", *arms)}
        for arm, each in trainers.items():
            # Replicas compare Adam's variances after each of the first ten steps, then after every eighth.
            each.steps(_WARM if "lowbit" in arm else _PERIOD if "sync_every" in arm else 5)
        blocks = {arm: Blocks(each, _steps(arm, quick)) for arm, each in trainers.items()}
        seconds = timed(blocks, 2 if quick else _BLOCKS)
        if rank == 0:
            tell(
                {
                    "profile": profile.with_costs(costs).to_json(),
                    "links": links.to_json(),
                    "seconds": seconds,
                    "megabytes": {arm: each.megabytes for arm, each in blocks.items()},
                }
            )
        for each in trainers.values():
            each.close()


def _steps(arm: str, quick: bool) -> int:
    """Of a block."""
    if "sync_every" in arm:
        return _PERIOD
    return 1 if quick or arm == "ddp" else 3


def _work(model: str) -> Any:
    from arms import BATCH, Work, on_images
    from tacit_lab import recipes

    if model == "vgg11":
        return on_images(mixed=False, batch=BATCH)
    recipe = recipes.get(model)
    batch = next(recipe.train_batches(0, 0, 1, 0))
    return Work(recipe.model(0), recipe.optimizer, lambda: batch, recipe.loss)


# ---- outside ------------------------------------------------------------------------------------------


def measure_setting(model: str, cluster: str, quick: bool) -> list[dict[str, Any]]:
    """One model on one cluster: a row an arm."""
    from tacit.algorithms import parse
    from tacit.links import Links
    from tacit.planning.cluster_prediction import predict
    from tacit.planning.profile import Profile
    from tacit.planning.simulation import networks

    arms = (*GRADIENTS, *PERIODIC, *{**CLUSTERS, **LATE}[cluster])
    words = [__file__, "--rank", model, "--arms", ";".join(arms), *(["--quick"] if quick else [])]
    found = in_testbed(cluster, words, timeout=1800)
    profile, links = Profile.from_json(found["profile"]), Links.from_json(found["links"])
    network = networks.measured(links, profile)
    alone = found["seconds"]["compute-only"]
    busy = max(1.0, profile.threads * network.sharing / network.cores)
    then = [as_then(profile, each / (busy * profile.step.seconds)) for each in alone]
    profile = as_then(profile, statistics.median(alone) / (busy * profile.step.seconds))
    apart = held_out()
    rows = []
    for arm in arms:
        predicted = predict(parse(arm), profile, network)
        measured = statistics.median(found["seconds"][arm])
        by_block = [predict(parse(arm), each, network).seconds for each in then]
        off = statistics.median(map(truediv, by_block, found["seconds"][arm])) - 1
        rows.append(
            {
                "model": model,
                "cluster": cluster,
                "arm": arm,
                "held_out": (model, cluster, arm) in apart,
                "measured_ms": 1e3 * measured,
                "predicted_ms": 1e3 * statistics.median(by_block),
                "off": off,
                "formula_ms": 1e3 * formula(arm, predicted.bytes_out, profile.step.seconds, network),
                "predicted_mb": predicted.bytes_out / 1e6,
                "interface_mb": found["megabytes"][arm],
                "parts_ms": {
                    "compute": 1e3 * predicted.compute,
                    "between_nodes": 1e3 * predicted.far,
                    "inside_nodes": 1e3 * predicted.near,
                    "encoding": 1e3 * predicted.encoding,
                },
                "blocks_ms": [1e3 * each for each in found["seconds"][arm]],
                "predicted_blocks_ms": [1e3 * each for each in by_block],
                "compute_only_ms": 1e3 * statistics.median(alone),
                "compute_only_blocks_ms": [1e3 * each for each in alone],
            }
        )
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def as_then(profile: Profile, factor: float) -> Profile:
    """The profile with all computing so many times as long, as it was while the arms were timed.

    By steps that send nothing in the same block: what other work on the machine takes is not the clock's.
    """
    costs = [
        replace(
            each,
            levels=tuple(
                replace(
                    level,
                    main=factor * level.main,
                    buckets=tuple(
                        replace(b, segments=tuple(factor * s for s in b.segments)) for b in level.buckets
                    ),
                )
                for level in each.levels
            ),
        )
        for each in profile.costs
    ]
    return replace(profile, step=profile.step.scaled(factor)).with_costs(costs)


def formula(arm: str, bytes_out: float, computing: float, network: Any) -> float:
    """The literature's: computing, then latencies and bytes over the rate. Cores are not shared in it."""
    period = _PERIOD if arm in (*PERIODIC, *NODES) else 1
    latencies = 2 * (network.nodes * network.ranks - 1) * network.latency / period
    return float(computing + latencies + bytes_out / network.rate)


def chosen(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each setting and each class of what is accepted: the choice by prediction, and the best one."""
    settings = dict.fromkeys((row["model"], row["cluster"]) for row in rows)
    for model, cluster in settings:
        here = [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)]
        for accept, arms in ACCEPT.items():
            among = [row for row in here if row["arm"] in arms]
            if len(among) < 2:
                continue
            choice = min(among, key=lambda row: float(row["predicted_ms"]))
            best = min(among, key=lambda row: float(row["measured_ms"]))
            ddp = next(row for row in here if row["arm"] == "ddp")
            yield {
                "model": model,
                "cluster": cluster,
                "accept": accept,
                "choice": choice["arm"],
                "best": best["arm"],
                "over_best": choice["measured_ms"] / best["measured_ms"] - 1,
                "over_ddp": choice["measured_ms"] / ddp["measured_ms"] - 1,
            }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many are within the limits, of all and of those held out; by the clock, and by formulas."""
    found: dict[str, Any] = {}
    for name, some in (("all", rows), ("held out", [row for row in rows if row["held_out"]])):
        off = [abs(row["off"]) for row in some]
        formulas = [abs(row["formula_ms"] / row["measured_ms"] - 1) for row in some]
        found[name] = {
            "configurations": len(some),
            "within_10": sum(each <= WITHIN[0] for each in off),
            "within_25": sum(each <= WITHIN[1] for each in off),
            "worst": max(off, default=None),
            "formulas_within_10": sum(each <= WITHIN[0] for each in formulas),
            "formulas_worst": max(formulas, default=None),
        }
    return found


def _line(row: Mapping[str, Any]) -> str:
    mark = "held out" if row["held_out"] else ""
    return (
        f"{row['model']:8}{row['cluster']:32}{row['arm']:28}{row['measured_ms']:10.1f}"
        f"{row['predicted_ms']:10.1f}{100 * row['off']:+8.1f} %{row['formula_ms']:10.1f}"
        f"{row['predicted_mb']:9.2f}{row['interface_mb']:9.2f}  {mark}"
    )


def table(result: Mapping[str, Any]) -> str:
    """All of it as text."""
    head = (
        f"{'model':8}{'cluster':32}{'arm':28}{'measured':>10}{'predicted':>10}{'off':>10}{'formula':>10}"
        f"{'MB':>9}{'counted':>9}"
    )
    lines = [head, *map(_line, result["rows"]), ""]
    lines += [
        f"{name}: {each['within_10']} of {each['configurations']} within 10 %, {each['within_25']} within "
        f"25 %, worst {100 * each['worst']:.1f} %; by formulas {each['formulas_within_10']} within 10 %, "
        f"worst {100 * each['formulas_worst']:.0f} %"
        for name, each in result["verdicts"].items()
        if each["configurations"]
    ]
    lines += ["", "auto:"]
    lines += [
        f"{each['model']:8}{each['cluster']:32}{each['accept']:10}{each['choice']:28} best "
        f"{each['best']:28}{100 * each['over_best']:+6.1f} % over the best, "
        f"{100 * each['over_ddp']:+6.1f} % over ddp"
        for each in result["auto"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure all settings, or print a saved result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model on one cluster, fewer blocks")
    parser.add_argument("--only", help="settings, with commas: e.g. vgg11/4x1@1gbit")
    parser.add_argument("--late", action="store_true", help="links of latency in place of the others")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--json", action="store_true")
    add_table(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--arms", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.arms.split(";"), options.quick)
        return
    if options.table:
        print(table(options.table))
        return
    settings = [(model, cluster) for model in MODELS for cluster in (LATE if options.late else CLUSTERS)]
    if options.only:
        settings = [each for each in settings if "/".join(each) in options.only]
    if options.quick:
        settings = settings[:1]
    rows = [row for setting in settings for row in measure_setting(*setting, options.quick)]
    result = {
        "benchmark": "foresight-late" if options.late else "foresight",
        "hardware": hardware(),
        "seed": SEED,
        "rows": rows,
        "verdicts": verdicts(rows),
        "auto": [*chosen(rows)],
    }
    conclude(result, table(result), options)


if __name__ == "__main__":
    main()
