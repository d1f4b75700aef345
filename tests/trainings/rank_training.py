"""A small model to train on every rank, what ranks compare, and checks that run on all of them."""

import json
import os
import re
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.kernels.dispatch import emulated_device

T = TypeVar("T")
LONGEST = timedelta(seconds=120)
"""That a message of another rank may take, on a machine that does much else."""
EMULATED = "TACIT_TESTS_EMULATED"
"""Set, models on the CPU are exchanged as those on a GPU are: in stream order, and never looked at."""


class Checks(dict[str, Callable[[], None]]):
    """Functions by name, that run on all ranks of one launch."""

    def add(self, function: Callable[[], None]) -> Callable[[], None]:
        self[function.__name__] = function
        return function

    def run(self, names: Collection[str] = ()) -> None:
        """Run them all, or those that are named, and print how each has ended."""
        torch.set_num_threads(1)
        # All threads of a rank on one core: Gloo's seldom runs, and spins, while others hold its locks.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(os.getppid() + int(os.environ["RANK"])) % len(cores)]})
        dist.init_process_group("gloo", timeout=LONGEST)
        for name in names or self:
            error = None
            try:
                # No check needs to know exactly how fast links are, and each measurement takes seconds.
                with (
                    patch("tacit.levels.node_layout._SHORTLY", 0.002),
                    emulated_device() if os.environ.get(EMULATED) else nullcontext(),
                ):
                    self[name]()
            except Exception:
                error = traceback.format_exc()
            print(json.dumps({"check": name, "error": error}), flush=True)
            dist.barrier()
        dist.destroy_process_group()


def here(every: Sequence[T], as_on_a_gpu: Sequence[T]) -> Sequence[T]:
    """What a check tries: all, or as on a GPU one of each way there."""
    return as_on_a_gpu if os.environ.get(EMULATED) else every


# ---- a model and its training -------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 5))


def wrapped(model: nn.Module | None = None, **options: object) -> DDP:
    # 0.2 MiB: several buckets, as large models have.
    return DDP(model or network(), bucket_cap_mb=0.2, gradient_as_bucket_view=True, **options)


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def steps(model: DDP, optimizer: torch.optim.Optimizer, count: int, seed: int = 0, micro: int = 1) -> None:
    """`count` steps on data of this rank's own; `micro` backward passes a step, all but the last unsynced."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad()
        for i in range(micro):
            x = torch.randn(8, 20, generator=generator)
            y = torch.randint(0, 5, (8,), generator=generator)
            if i < micro - 1:
                with model.no_sync():
                    nn.functional.cross_entropy(model(x), y).backward()
            else:
                nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def everywhere(x: Tensor) -> list[Tensor]:
    all_ = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(all_, x)
    return all_


def same_on_all_ranks(x: Tensor) -> bool:
    return all(torch.equal(x, other) for other in everywhere(x))


def trained(
    algorithm: str | tacit.Strategy, count: int = 10, momentum: float = 0.9, micro: int = 1
) -> Tensor:
    """The parameters after training; equal on all ranks, to the bit."""
    if algorithm == "ddp":
        return plain_ddp(count, momentum, micro)
    return _trained(algorithm, count, momentum, micro)


@cache
def plain_ddp(count: int, momentum: float, micro: int) -> Tensor:
    """What others are compared with: once in a launch is enough."""
    return _trained("ddp", count, momentum, micro)


def _trained(algorithm: str | tacit.Strategy, count: int, momentum: float, micro: int) -> Tensor:
    model = wrapped()
    optimizer = sgd(model, momentum)
    with tacit.attach(model, optimizer, algorithm):
        steps(model, optimizer, count, micro=micro)
    assert same_on_all_ranks(flat(model)), f"{algorithm}: ranks differ"
    return flat(model)


def close_to(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> None:
    worst = float((a - b).abs().max())
    assert worst <= tolerance, f"they differ by {worst}"


def raises(kind: type[Exception], call: Callable[[], object], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        call()
