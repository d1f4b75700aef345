"""Where the processor time of a step goes: by thread, and by stage of an exchange.

    python benchmarks/profiles.py            # all models and arms: about 40 minutes
    python benchmarks/profiles.py --quick    # VGG-11 with ddp and topk, about 2 minutes
    python benchmarks/profiles.py --only vgg11,topk,compute-only
    python benchmarks/profiles.py --only vgg11,ps,lowbit --cluster 4x1+1@100mbit    # by a parameter server
    python benchmarks/profiles.py --json     # the last line on stdout is one JSON object

The models are those of the recipes of `tacit compare`, with their optimizers at a hundredth of the learning
rate, as images are made up and the same in every step. `compute-only` is the model alone, without DDP.
Processor time means something on a loaded machine too, but caches and cores that others use make it longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle
from typing import TYPE_CHECKING, Any

from launched import in_testbed, tell
from paired import conclude, hardware
from runs import COMPUTE_ONLY

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tacit_lab.profiling.recorder import ProfileRecorder
    from tacit_lab.recipes.recipe import Recipe
    from tacit_lab.testbed import Serving

MODELS = {"vgg11": "cifar10", "resnet20": "cifar10", "bytes": "bytes"}
"""The models, and their recipes."""
ARMS = {
    COMPUTE_ONLY: "",
    "ddp": "ddp",
    "topk": "topk:ratio=0.01",
    "dgc": "dgc:ratio=0.001",
    "powersgd": "powersgd",
    "efsign": "efsign",
    "int8": "int8",
    "qsgd": "qsgd",
    "ps": "ps",
    "lowbit": "lowbit",
    "lowbit-late": "lowbit:sync_every=2,late=1",
    "lowbit-entropy": "lowbit:entropy=true",
    "mp2": "mp2",
    "ednncomm": "ednncomm:sync_every=5",
    "diloco": "diloco:sync_every=5",
}
"""The arms, and what is attached. Rounds of several steps are short, so that whole ones are measured."""
WITHOUT = {("bytes", "dgc"): "dgc takes over the momentum of SGD, and this recipe trains by AdamW"}
"""What cannot be, and why."""
QUICK = {"models": ("vgg11",), "arms": ("ddp", "topk")}
SKIPPED, STEPS = 5, 10
"""Steps that are left out, and measured. These are whole numbers of rounds."""
RATE = 0.01
_OTHER_STAGES = (
    *("forward", "backward", "optimizer", "zero_grad", "kernel ", "not attributed", "the profile itself"),
)
"""How the stages begin that are the script's, kernels, or in no stage."""


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(model: str, arm: str, steps: int) -> None:
    """Profile one arm; rank 0 tells the means of all ranks."""
    import torch.distributed as dist

    from arms import ranks
    from tacit_lab.profiling.profile import Summary
    from tacit_lab.profiling.recorder import ProfileRecorder

    recorder = ProfileRecorder(SKIPPED, steps)
    recorder.instrument()
    with ranks() as rank:
        _train(recorder, model, ARMS[arm], 1 + SKIPPED + steps)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, recorder.profile(rank))
        if rank == 0:
            tell(asdict(Summary.of(found)))


def _train(recorder: ProfileRecorder, model: str, algorithm: str, steps: int) -> None:
    from tacit_lab import recipes

    name = MODELS[model]
    recipe = recipes.get(name, recipes.Choices(model=model) if name == "cifar10" else recipes.NO_CHOICES)
    module = recipe.model(0)
    module.forward = recorder.clock.timed(module.forward, "forward")
    optimizer = recipe.optimizer(module)
    for group in optimizer.param_groups:
        group["lr"] *= RATE
    batches = _batches(recipe)
    with _attached(module, optimizer, algorithm) as (forward, session), recorder.watching():
        for _, (inputs, targets) in zip(range(steps), batches, strict=False):
            optimizer.zero_grad()
            loss = recipe.loss(forward(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if session is not None:
                session.observe(loss.detach())
            optimizer.step()


@contextmanager
def _attached(
    module: nn.Module, optimizer: Any, algorithm: str
) -> Iterator[tuple[Callable[[Tensor], Tensor], Any]]:
    """What training calls, and the session if there is one; plain DDP is left to torch alone."""
    from torch.nn.parallel import DistributedDataParallel

    import tacit

    if not algorithm:
        yield module, None
        return
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if algorithm == "ddp":
        yield model, None
        return
    with tacit.attach(model, optimizer, algorithm) as session:
        yield model, session


def _batches(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the recipe, or made-up images, the same again and again."""
    import torch
    import torch.distributed as dist

    if recipe.name.startswith("cifar10"):
        generator = torch.Generator().manual_seed(dist.get_rank())
        images = torch.randn(recipe.batch, 3, 32, 32, generator=generator)
        classes = torch.randint(0, 10, (recipe.batch,), generator=generator)
        return cycle([(images.to(memory_format=torch.channels_last), classes)])
    return recipe.train_batches(0, dist.get_rank(), dist.get_world_size(), 0)


# ---- outside ------------------------------------------------------------------------------------------


def measure(cluster: str, model: str, arm: str, steps: int) -> dict[str, Any]:
    """Profile one arm on an emulated cluster, by its parameter servers where it uses some."""
    servers = _servers(cluster, ARMS[arm])
    found = in_testbed(cluster, [__file__, "--rank", model, arm, str(steps)], servers=servers)
    return {"model": model, "arm": arm, "attached": ARMS[arm], "cluster": cluster, **found}


def _why_not(cluster: str, model: str, arm: str) -> str:
    """Why an arm cannot be measured; "" where it can."""
    from tacit_lab.cluster import Cluster

    if arm == "ps" and not Cluster.parse(cluster).servers:
        return f"it pushes to a parameter server, and {cluster} has none: write --cluster 4x1+1@100mbit"
    return WITHOUT.get((model, arm), "")


def _servers(cluster: str, algorithm: str) -> Serving | None:
    """How the servers are run; None where there are none, or would be nothing for them to do."""
    from tacit import algorithms
    from tacit.attaching.requirements import uses_servers
    from tacit_lab.cluster import Cluster
    from tacit_lab.testbed import Serving

    if algorithm in ("", "ddp") or not Cluster.parse(cluster).servers:
        return None
    return Serving() if uses_servers(algorithms.parse(algorithm)) else None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of all arms, and one of them side by side."""
    from tacit_lab.profiling.profile import ProfileRow, Summary

    lines = []
    summaries = []
    for row in rows:
        numbers = {name: row[name] for name in Summary.__dataclass_fields__ if name != "rows"}
        summaries.append(Summary(rows=tuple(ProfileRow(**each) for each in row["rows"]), **numbers))
        title = f"{row['model']} with {row['attached'] or row['arm']} on {row['cluster']}"
        lines += [f"== {title}", *summaries[-1].lines(), ""]
    lines.append(
        f"{'model':10}{'arm':14}{'step ms':>9}{'CPU ms':>9}{'main':>9}{'lane':>9}{'Gloo':>9}{'others':>9}"
        f"{'Python':>9}"
    )
    for row, summary in zip(rows, summaries, strict=True):
        lines.append(
            f"{row['model']:10}{row['arm']:14}{summary.wall_ms:9.1f}{summary.cpu_ms:9.1f}{_by_kind(summary)}"
            f"{_of_python(summary):9.1f}"
        )
    return "\n".join(lines)


def _by_kind(summary: Any) -> str:
    kinds = dict.fromkeys(("main", "tacit: lane", "Gloo", ""), 0.0)
    for thread, ms in summary.by_thread().items():
        kinds[next(kind for kind in kinds if thread.startswith(kind))] += ms
    return "".join(f"{round(ms, 1) + 0.0:9.1f}" for ms in kinds.values())


def _of_python(summary: Any) -> float:
    """ms in stages of tacit that are no kernels: Python, and what it calls of torch."""
    ms = (row.ms for row in summary.rows if not row.stage.startswith(_OTHER_STAGES))
    return float(sum(ms))


def _chosen(only: str | None, quick: bool) -> tuple[Sequence[str], Sequence[str]]:
    """The models and arms that were asked for.

    Raises:
        SystemExit: a name is neither.
    """
    models, arms = (QUICK["models"], QUICK["arms"]) if quick else (tuple(MODELS), tuple(ARMS))
    names = only.split(",") if only else []
    strange = [name for name in names if name not in MODELS and name not in ARMS]
    if strange:
        raise SystemExit(f"--only {','.join(strange)}: write some of {', '.join([*MODELS, *ARMS])}")
    return (
        [name for name in names if name in MODELS] or models,
        [name for name in names if name in ARMS] or arms,
    )


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="VGG-11 with ddp and topk")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-profiles.json")
    parser.add_argument("--only", help="some models and arms, with commas, such as vgg11,topk,dgc")
    parser.add_argument("--cluster", default="4x1@100mbit", help="default: 4x1@100mbit")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        model, arm, steps = options.rank
        rank_main(model, arm, int(steps))
        return
    models, arms = _chosen(options.only, options.quick)
    pairs = [(model, arm) for model in models for arm in arms]
    without = {pair: _why_not(options.cluster, *pair) for pair in pairs}
    for (model, arm), why in without.items():
        if why:
            print(f"{model} without {arm}: {why}", file=sys.stderr)
    rows = [measure(options.cluster, *pair, STEPS) for pair in pairs if not without[pair]]
    result = {"benchmark": "profiles", "quick": options.quick, "hardware": hardware(), "rows": rows}
    conclude(result, table(rows), options)


if __name__ == "__main__":
    main()
