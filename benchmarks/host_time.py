"""What a bucket costs the host in stream order, without a GPU: Python alone, and how much is launched.

Tensors on the CPU are treated as a GPU's, and are small; kernels of tacit do nothing, and collectives are
those of torch's fake process group. What is left is the Python that a bucket costs, and its small operations
of torch, in the thread's processor time. What Triton and NCCL take for each launch on a GPU is not in it. How
many there are is counted: operations of torch that are no views, and calls of tacit's kernels, each of which
is one launch or several. Where parameters are exchanged it is a bucket's share of `optimizer.step`, SGD's own
operations included.

    python benchmarks/host_time.py                      # a table
    python benchmarks/host_time.py topk --profile       # where it goes, by cProfile
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import tacit
from tacit.attaching.failures import Failures
from tacit.gradients.ddp_hook import HookDispatcher
from tacit.kernels import dispatch
from tacit.session.health.device_notes import DeviceReport
from tacit.transports import process_groups

ALGORITHMS = (
    "dense",
    "bf16",
    "int8",
    "efsign",
    "qsgd",
    "powersgd",
    "topk:chunk=4096",
    "topk",
    "dgc",
    "gtopk",
    "lowbit:sync_every=1",
    "lowbit:sync_every=1,entropy=true",
    "int8:entropy=true",
    "topk:entropy=true",
    "three-lc",
)
RANKS, LAYERS, WIDTH = 4, 36, 64
"""A bucket has two or three layers, each of a matrix and a bias."""
WARM, STEPS = 8, 30
VIEWS = ("view", "slice", "as_strided", "select", "detach", "alias", "split", "unbind", "expand", "unsqueeze",
         "reshape", "t", "transpose", "permute", "_unsafe_view", "view_as_real", "empty", "empty_like",
         "new_empty", "empty_strided", "squeeze", "split_with_sizes",
         "promote_types")  # fmt: skip


def in_a_kernel() -> bool:
    """Whether the caller was called by a kernel of the table, which an earlier session may have looked up."""
    frame = inspect.currentframe()
    while frame is not None and "/tacit/kernels/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be launched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self.buckets = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS and not in_a_kernel():
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


KERNELS: Counter[str] = Counter()


def body_alone(backend: str, module: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that computes nothing, and is counted."""

    def counted(*given: Any) -> Any:
        KERNELS[body.__name__] += 1
        return body(*given)

    return counted


def not_coded(name: str, by_host: Callable[..., Any], *given: Any) -> torch.Tensor:
    """An entropy coder that does nothing, and is counted; its messages have no bytes."""
    KERNELS[name] += 1
    numbers = [each for each in given[1:] if isinstance(each, torch.Tensor) and each.dtype == torch.int32]
    return numbers[0] if numbers else torch.zeros((), dtype=torch.int32)


def fake_groups(
    parent: Any, places: Any, timeout: Any, backend: str, use: Any, count: int, connections: int
) -> list[dist.ProcessGroup]:
    """Groups whose collectives do nothing."""
    return [dist.new_group([*places], timeout, "fake") for _ in range(count)]


@contextmanager
def training(algorithm: str, launches: Launches | None = None) -> Iterator[Callable[[], float]]:
    """A function that takes a step, and returns the seconds a bucket that tacit's hook took."""

    with ExitStack() as entered:
        dist.init_process_group("fake", store=HashStore(), rank=0, world_size=RANKS)
        entered.callback(dist.destroy_process_group)
        for target, name, instead in (
            (Failures, "watch", lambda *_: None),
            (process_groups, "own_groups", fake_groups),
            (dispatch, "_version", body_alone),
            (dispatch, "run_opaque", not_coded),
            (DeviceReport, "quiet", property(lambda _: True)),  # whatever no kernel has written
        ):
            entered.enter_context(patch.object(target, name, instead))
        entered.enter_context(dispatch.emulated_device())
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        cap = 2.01 * 4 * WIDTH * (WIDTH + 1) / 2**20  # a bucket is closed by the layer that exceeds it
        model = DDP(net, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.0)
        session = tacit.attach(model, optimizer, algorithm, timeout=timedelta(seconds=30))
        entered.callback(session._leave)
        board = HookDispatcher.of(model)
        real, spent, buckets = board.answer, [0.0], [0]

        def answer(bucket: Any) -> Any:
            began = time.thread_time()
            with launches or nullcontext():
                future = real(bucket)
            spent[0] += time.thread_time() - began
            buckets[0] += 1
            if launches is not None:
                launches.buckets += 1
            return future

        of_parameters = session.session.strategy.subject == "delta"
        if not of_parameters:
            board.answer = answer
        x = torch.ones(2, WIDTH)

        def step() -> float:
            spent[0], buckets[0] = 0.0, 0  # of DDP there is one bucket in the first step
            model(x).sum().backward()
            if of_parameters:
                began, buckets[0] = time.thread_time(), len(session.session.buckets)
                with launches or nullcontext():
                    optimizer.step()
                spent[0] = time.thread_time() - began
                if launches is not None:
                    launches.buckets += buckets[0]
            else:
                optimizer.step()
            optimizer.zero_grad()
            return spent[0] / buckets[0]

        yield step


def measured(algorithm: str) -> dict[str, float]:
    """Of a bucket: microseconds of the thread (least and median of the steps), and launches."""
    with training(algorithm) as step:
        for _ in range(WARM):
            step()
        took = sorted(step() for _ in range(STEPS))
    launches = Launches()
    with training(algorithm, launches) as step:
        for _ in range(WARM):
            step()
        launches.found.clear()
        launches.buckets = 0
        KERNELS.clear()
        step()
    return {
        "least_us": took[0] * 1e6,
        "median_us": statistics.median(took) * 1e6,
        "torch": launches.found.total() / launches.buckets,
        "kernels": KERNELS.total() / launches.buckets,
    }


def main() -> None:
    """Print the table, or a profile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithms", nargs="*", default=ALGORITHMS)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for algorithm in given.algorithms:
        if given.profile:
            with training(algorithm) as step:
                for _ in range(WARM):
                    step()
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(STEPS):
                    step()
                profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        else:
            found = measured(algorithm)
            print(
                f"{algorithm:32} {found['least_us']:6.0f} us at least, {found['median_us']:6.0f} median; "
                f"{found['torch']:5.1f} operations of torch, {found['kernels']:4.1f} of tacit",
                flush=True,
            )


if __name__ == "__main__":
    main()
