"""What it is worth that residuals follow the learning rate, and two topologies at equal bytes.

python benchmarks/owing.py --data PATH [--seeds 3] [--epochs 15] [--only rescale|bytes] [--arms TEXT]
                           [--rate 1] [--save]

Trains a narrow VGG-11 on 10,000 images of CIFAR-10 (the recipe's schedule: up, then down to 0) on four ranks
of this machine, with and without `rescale`, and top-k by an all-gather and by two phases; each pair from
equal weights and data. Prints accuracy and loss, and the difference of each pair with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from launched import in_testbed, tell
from paired import hardware, named, save

PAIRS = {
    "rescale": [
        (f"{each},rescale=true", f"{each},rescale=false")
        for each in ("topk:ratio=0.003", "topk:ratio=0.01", "efsign:block=512", "powersgd:rank=2")
    ],
    "bytes": [("topk:ratio=0.01,topology=all-gather", "topk:ratio=0.02,topology=two-phase")],
}
_Way = Literal["all-gather", "two-phase"]
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
"""Of Student's t, by degrees of freedom."""


def owing_arms() -> None:
    """Let the text form say `rescale`, which is no parameter of the algorithms."""
    from tacit.algorithms import ALGORITHMS
    from tacit.algorithms.options.named_options import way
    from tacit.compressors import ErrorFeedback, PowerSGD, Sign, TopK
    from tacit.strategy import Strategy

    def topk(ratio: float, topology: _Way = "all-gather", rescale: bool = True) -> Any:
        return Strategy(compressor=ErrorFeedback(TopK(ratio=ratio), rescale), topology=way(topology))

    def efsign(block: int = 512, rescale: bool = True) -> Any:
        return Strategy(compressor=ErrorFeedback(Sign(block=512), rescale), topology=way("two-phase"))

    def powersgd(rank: int, rescale: bool = True) -> Any:
        return Strategy(compressor=ErrorFeedback(PowerSGD(rank=rank), rescale))

    ALGORITHMS.update({"topk": topk, "efsign": efsign, "powersgd": powersgd})


def rank_main(about: Mapping[str, Any]) -> None:
    """Train with each arm; rank 0 tells how each ended."""
    from arms import ranks
    from tacit.algorithms import parse
    from tacit_lab import recipes
    from tacit_lab.recipes import Choices
    from tacit_lab.recipes.training import Task, train
    from tacit_lab.records import EpochRecord

    owing_arms()

    def at_rate(make: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
        def made(model: nn.Module) -> Optimizer:
            optimizer = make(model)
            for group in optimizer.param_groups:
                group["lr"] *= about["rate"]
            return optimizer

        return made

    given = Choices(
        data=Path(about["data"]), model=about["model"], limit=about["limit"], precision=about["precision"]
    )
    recipe: Any = recipes.get("cifar10", given)
    recipe.optimizer = at_rate(recipe.optimizer)
    with ranks(300) as rank:
        found = {}
        for arm in about["arms"]:
            ends: list[Any] = []
            task = Task(
                strategy=parse(arm),
                epochs=about["epochs"],
                seed=about["seed"],
                target=0.99,
                cluster="local:4",
                shaped=False,
            )
            train(task, recipe, ends.append)
            last = [each for each in ends if isinstance(each, EpochRecord)][-1]
            found[arm] = {"accuracy": last.accuracy, "loss": last.loss}
        if rank == 0:
            tell(found)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """By arm, accuracies and losses of every seed."""
    pairs = [pair for name, each in PAIRS.items() if options.only in (None, name) for pair in each]
    pairs = [pair for pair in pairs if pair[0].startswith(options.arms)]
    pairs = pairs[:1] if options.quick else pairs
    arms = ["ddp", *dict.fromkeys(arm for pair in pairs for arm in pair)]
    rows: dict[str, dict[str, list[float]]] = {arm: {"accuracy": [], "loss": []} for arm in arms}
    for seed in range(options.seeds):
        about = {
            "data": str(Path(options.data).resolve()),
            "model": options.model,
            "limit": 2000 if options.quick else options.limit,
            "precision": options.precision,
            "rate": options.rate,
            "epochs": options.epochs,
            "arms": arms,
            "seed": seed,
        }
        found = in_testbed("local:4", [__file__, json.dumps(about)])
        for arm, each in found.items():
            for key, value in each.items():
                rows[arm][key].append(value)
            print(f"{seed}  {arm:45} accuracy {each['accuracy']:.4f}  loss {each['loss']:.4f}", flush=True)
    return {
        "experiment": _experiment(options),
        "hardware": hardware(),
        "setting": {
            key: getattr(options, key)
            for key in ("model", "limit", "precision", "epochs", "seeds", "rate", "quick")
        },
        "arms": rows,
        "pairs": pairs,
    }


def _experiment(options: argparse.Namespace) -> str:
    which = "" if not options.arms else f"-{options.arms.replace(':', '-').replace('=', '')}"
    return f"{named('owing', options)}{which}{'' if options.rate == 1 else f'-rate{options.rate:g}'}"


def table(result: Mapping[str, Any]) -> str:
    """The differences of each pair."""
    lines = []
    for one, other in result["pairs"]:
        for key in ("accuracy", "loss"):
            a, b = (result["arms"][arm][key] for arm in (one, other))
            lines.append(f"{one} - {other}: {key} {_interval([x - y for x, y in zip(a, b, strict=True)])}")
    return "\n".join(lines)


def _interval(differences: Sequence[float]) -> str:
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.4f} (one seed)"
    half = T95.get(len(differences) - 1, 2.0) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{mean:+.4f} ± {half:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="a copy of CIFAR-10, as tacit compare takes it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--model", default="vgg11-narrow")
    parser.add_argument("--precision", help="bf16 is twice as fast where the processor knows it")
    parser.add_argument("--rate", type=float, default=1.0, help="times the recipe's learning rate")
    parser.add_argument("--only", choices=tuple(PAIRS))
    parser.add_argument("--arms", default="", help="only pairs that begin so, such as topk:ratio=0.01")
    parser.add_argument("--quick", action="store_true", help="one pair, 2,000 images")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    if not any(pair[0].startswith(options.arms) for each in PAIRS.values() for pair in each):
        parser.error(f"no pair begins with --arms {options.arms}")
    result = measured(options)
    print(table(result))
    if options.save:
        print(save(result["experiment"], result))


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(json.loads(sys.argv[1]))
    else:
        main()
