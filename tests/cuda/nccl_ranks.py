"""Four ranks of NCCL that share one GPU, in two nodes of two; run by `test_nccl_ranks`.

Where torch sees no GPU they are four ranks of Gloo, with tensors on the CPU that are treated as a GPU's: so
that this file is tried before a GPU runs it.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_training import (
    BY_ADAM,
    NEVER_RUN,
    ONLY_BY_ADAM,
    adamw,
    batches,
    flat,
    network,
    on,
    sgd,
    steps,
)
from host_sync import unsynchronized
from made_gpu import made_gpu
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from in_stream import IN_STREAM
from tacit.errors import NonFinite
from tacit.kernels.dispatch import emulated_device
from tacit.planning.decider import Choice, ChoosingSession

ALGORITHMS = [
    *(text for text in IN_STREAM if text.partition(":")[0] not in ("randomk", *ONLY_BY_ADAM)),
    "int8:topology=two-phase", "gossip:graph=ring", "diloco:sync_every=3,anchor_bits=16",
    "lowbit:anchor_bits=16",
]  # fmt: skip
"""`randomk` draws other entries on a GPU; it has a check of its own."""
BY_SIGN = ("signsgd", "demo")
AVERAGING = ["lowbit", "localsgd:sync_every=2", "diloco:sync_every=2,bits=4", "sparseloco:sync_every=2"]
EXCHANGING = ["dense", "int8", "qsgd", "topk:ratio=0.1", "powersgd:rank=1", "efsign"]
LOST = "a lost rank is told to the others"
KNOWN = {"steps_per_epoch": 5, "epochs": 4}
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
CPU = torch.device("cpu")
PATH = "on the GPU in stream order"


def there() -> AbstractContextManager[object]:
    return nullcontext() if GPU else emulated_device()


Made = Callable[[nn.Module], torch.optim.Optimizer]


class OnHost:
    """The same ranks without the GPU."""

    group: dist.ProcessGroup


def wrapped(device: torch.device, **options: Any) -> DDP:
    group = OnHost.group if device == CPU else None
    return DDP(
        network(device), gradient_as_bucket_view=True, bucket_cap_mb=0.2, process_group=group, **options
    )


def everywhere(x: Tensor) -> list[Tensor]:
    all_ = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(all_, x)
    return all_


def assert_equal_on_all_ranks(x: Tensor) -> None:
    assert all(torch.equal(each, x) for each in everywhere(x)), "ranks differ"


def trained(algorithm: str, device: torch.device, made: Made = sgd, **options: Any) -> Tensor:
    """The parameters after training, on the CPU; equal on all ranks, to the bit. `made`: the optimizer."""
    model = wrapped(device)
    optimizer = made(model)
    with tacit.attach(model, optimizer, algorithm, **KNOWN, **options) as session:
        if device == DEVICE and algorithm != "ddp" and not options:
            assert PATH in session.active_path, session.active_path
        steps(model, optimizer, on(device, batches(10, dist.get_rank())), session.observe)
    assert_equal_on_all_ranks(flat(model).to(DEVICE))
    return flat(model).cpu()


# ---- checks -------------------------------------------------------------------------------------------


def as_on_cpus(algorithm: str) -> None:
    """A strategy leads where the same ranks on CPUs come to.

    With `signsgd` and `demo` a gradient near zero moves a parameter as far as any: they have the same
    gradients on both sides, and only exchange them on the host.
    """
    with there():
        found = trained(algorithm, DEVICE)
        expected = found
        if GPU and algorithm in BY_SIGN:
            expected = trained(algorithm, DEVICE, exchange_on="host")
    if GPU and algorithm not in BY_SIGN:
        expected = trained(algorithm, CPU)
    apart = float((found - expected).abs().max())
    assert apart < 2e-2, f"{apart} from what ranks on CPUs come to"


def as_on_cpus_with_adam(algorithm: str) -> None:
    """A few entries may be a step apart: where a gradient is nearly zero, its sign is what rounding left."""
    with there():
        found = expected = trained(algorithm, DEVICE, adamw)
    if GPU:
        expected = trained(algorithm, CPU, adamw)
    apart = float((found - expected).abs().mean())
    assert apart < 1e-4, f"{apart} from what ranks on CPUs come to"


def draws_are_equal() -> None:
    with there():
        trained("randomk:ratio=0.1", DEVICE)


def dense_is_ddp() -> None:
    """But for the order of sums, which NCCL chooses by the size of a message."""
    with there():
        apart = float((trained("dense", DEVICE) - trained("ddp", DEVICE)).abs().max())
    assert apart < 1e-5, apart


def nobody_waits(algorithm: str) -> None:
    model = wrapped(DEVICE)
    optimizer = sgd(model)
    with there(), tacit.attach(model, optimizer, algorithm, **KNOWN):
        steps(model, optimizer, on(DEVICE, batches(8, dist.get_rank())))
        data = on(DEVICE, batches(3, dist.get_rank(), seed=1))
        if GPU:
            torch.cuda.synchronize()
        with unsynchronized() if GPU else nullcontext():
            steps(model, optimizer, data)


def a_nan_of_one_rank_is_told_on_all(algorithm: str) -> None:
    model = wrapped(DEVICE)
    optimizer = sgd(model)
    with there():
        session = tacit.attach(model, optimizer, algorithm, **KNOWN)
        steps(model, optimizer, on(DEVICE, batches(5, dist.get_rank())))
        before = flat(model)
        if dist.get_rank() == 2:
            model.module[2].weight.register_hook(lambda g: g * math.nan)
        with pytest.raises(NonFinite, match=r"2\.weight.*rank 2"):
            steps(model, optimizer, on(DEVICE, batches(1, dist.get_rank())))
        assert torch.equal(flat(model), before)
        session.close()


def an_overflow_of_one_rank_is_skipped_on_all(algorithm: str) -> None:
    model = wrapped(DEVICE)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0, growth_interval=1000)
    with there(), tacit.attach(model, optimizer, algorithm, scaler=scaler, **KNOWN) as session:
        for i, (x, y) in enumerate(on(DEVICE, batches(8, dist.get_rank()))):
            optimizer.zero_grad()
            before = flat(model)
            factor = math.inf if i == 5 and dist.get_rank() == 1 else 1.0
            scaler.scale(nn.functional.cross_entropy(model(x), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(flat(model), before) == (i == 5)
        session.flush()
        assert session.metrics()["void_rounds"] == 1
    assert_equal_on_all_ranks(flat(model))
    assert scaler.get_scale() == 128.0


class Mesh:
    """Two replicas of two shards each."""

    mesh: DeviceMesh


def sharded(algorithm: str | None, **options: Any) -> Tensor:
    """All parameters after training a model that FSDP2 shards, on the CPU. None: DDP, without tacit."""
    if algorithm is None:
        model: Any = wrapped(DEVICE)
        optimizer = sgd(model)
        steps(model, optimizer, on(DEVICE, batches(6, dist.get_rank())))
        return flat(model).cpu()
    model = network(DEVICE)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=Mesh.mesh["near"])
    fully_shard(model, mesh=Mesh.mesh["near"])
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm, mesh=Mesh.mesh, **options) as session:
        assert (PATH in session.active_path) == (options.get("exchange_on") != "host")
        steps(model, optimizer, on(DEVICE, batches(6, dist.get_rank())), session.observe)
    found = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    assert_equal_on_all_ranks(found)
    return found.cpu()


def shards_learn_what_ddp_does() -> None:
    with there():
        apart = float((sharded("dense") - sharded(None)).abs().max())
    assert apart < 1e-5, apart


def shards_by(algorithm: str) -> None:
    """In stream order, and on the host by other code."""
    with there():
        apart = float((sharded(algorithm) - sharded(algorithm, exchange_on="host")).abs().max())
    assert apart < 2e-2, apart


class Compressing:
    """Chooses `topk` after three steps."""

    steps = 3

    def begin(self, session: ChoosingSession) -> None:
        assert len(session.ranks) == dist.get_world_size()

    def measure(self, session: ChoosingSession) -> None:
        mine = torch.tensor([float(dist.get_rank())])
        assert session.from_all(mine).view(-1).tolist() == [*range(dist.get_world_size())]

    def decide(self) -> Choice:
        return Choice("topk:ratio=0.05", "topk it is", 1.0, (("ddp", 1.0),))


def a_choice_is_what_was_attached_by_hand() -> None:
    """To the bit: three steps with `dense`, and five with what is chosen then."""

    def run(by_hand: bool) -> Tensor:
        model = wrapped(DEVICE)
        optimizer = sgd(model)
        data = on(DEVICE, batches(8, dist.get_rank()))
        if by_hand:
            with tacit.attach(model, optimizer, "dense"):
                steps(model, optimizer, data[:3])
            with tacit.attach(model, optimizer, "topk:ratio=0.05"):
                steps(model, optimizer, data[3:])
            return flat(model)
        with tacit.attach(
            model, optimizer, "auto:accept=feedback,watch=none", decider=Compressing()
        ) as session:
            steps(model, optimizer, data)
            assert PATH in session.active_path, session.active_path
            assert session.choice is not None
            assert session.choice.algorithm == "topk:ratio=0.05"
        return flat(model)

    with there():
        found = run(by_hand=False)
        assert_equal_on_all_ranks(found)
        assert torch.equal(found, run(by_hand=True))


def auto_measures_and_chooses() -> None:
    """By events in the stream, NCCL's rings and copies; every rank takes what the first one has chosen."""
    with nullcontext() if GPU else made_gpu():
        model = wrapped(DEVICE)
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, "auto") as session:
            steps(model, optimizer, on(DEVICE, batches(16, dist.get_rank())))
            choice = session.choice
            assert choice is not None
            seconds = dict(choice.considered)
            assert all(seconds[text] for text in ("ddp", choice.algorithm)), choice
            assert "predicted" in choice.reason
            diagnosis = session.diagnose(steps=3)
            steps(model, optimizer, on(DEVICE, batches(10, dist.get_rank())))
        assert_equal_on_all_ranks(flat(model))
    assert diagnosis.result is not None
    assert diagnosis.result.notes == (), diagnosis.result


def a_lost_rank_is_told_to_the_others() -> None:
    """The last of all: it costs a rank."""
    model = wrapped(DEVICE)
    optimizer = sgd(model)
    with there():
        tacit.attach(model, optimizer, "topk:ratio=0.05", timeout=timedelta(seconds=20))
        steps(model, optimizer, on(DEVICE, batches(5, dist.get_rank())))
        if dist.get_rank() == 3:
            os._exit(0)
        began = time.monotonic()
        with pytest.raises(tacit.TacitError, match="rank 3"):
            steps(model, optimizer, on(DEVICE, batches(5, dist.get_rank())))
        took = time.monotonic() - began
    assert took < 60, f"after {took:.0f} s"


CHECKS: dict[str, Callable[[], None]] = {
    "dense is ddp": dense_is_ddp,
    **{f"as on CPUs: {each}": partial(as_on_cpus, each) for each in ALGORITHMS},
    **{f"with Adam as on CPUs: {each}": partial(as_on_cpus_with_adam, each) for each in BY_ADAM},
    "draws are equal": draws_are_equal,
    "auto measures and chooses": auto_measures_and_chooses,
    **{
        f"nobody waits: {each}": partial(nobody_waits, each)
        for each in ("dense", "topk:ratio=0.05", "powersgd:rank=2", "efsign", "qsgd", "pipesgd", *NEVER_RUN)
    },
    **{
        f"a NaN of one rank: {each}": partial(a_nan_of_one_rank_is_told_on_all, each)
        for each in ("dense", "topk:ratio=0.05", "powersgd:rank=2", "qsgd")
    },
    **{
        f"an overflow of one rank: {each}": partial(an_overflow_of_one_rank_is_skipped_on_all, each)
        for each in ("dense", "topk:ratio=0.05", "efsign")
    },
    "shards learn what ddp does": shards_learn_what_ddp_does,
    **{f"shards by {each}": partial(shards_by, each) for each in (*EXCHANGING, *AVERAGING)},
    "a choice is what was attached by hand": a_choice_is_what_was_attached_by_hand,
    LOST: a_lost_rank_is_told_to_the_others,
}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    os.environ["GROUP_RANK"] = str(rank // 2)
    if GPU:
        torch.cuda.set_device(0)
    longest = timedelta(seconds=60)
    dist.init_process_group("nccl" if GPU else "gloo", timeout=longest, device_id=DEVICE if GPU else None)
    OnHost.group = dist.new_group(backend="gloo", timeout=longest)
    Mesh.mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("far", "near"))
    for name in sys.argv[1:] or CHECKS:
        error = None
        began = time.monotonic()
        try:
            CHECKS[name]()
        except Exception:
            error = traceback.format_exc()
        seconds = time.monotonic() - began
        said = {"check": name, "rank": rank, "error": error, "seconds": round(seconds, 2)}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        if name != LOST:
            dist.barrier(group=OnHost.group)  # none begins while another compiles kernels
    os._exit(0)  # a rank is lost, and so are its collectives


if __name__ == "__main__":
    main()
