"""One rank of `benchmarks/peers.py`: trains the recipe `digits` with a peer or with tacit.

Runs in the peer's own virtual environment; of tacit it needs the recipe and the counters only. A peer is a
function here: it gets the task and the recipe, and sets the peer up as its own documentation has it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launched import tell
from tacit.transports.network_interfaces import congestion_control
from tacit_lab import recipes
from tacit_lab.recipes.meter import Meter, mean_over_ranks
from tacit_lab.recipes.recipe import Batch, Recipe

PATIENCE = timedelta(seconds=90)
"""How long to wait for a peer that is silent."""


@dataclass(frozen=True)
class Task:
    """What to train; the same on all ranks.

    Attributes:
        way: A name of `WAYS`.
        steps: Of the optimizer.
        every: Steps between two evaluations.
        period: Steps between two averages, where the peer averages.
        start: The step from which post-local SGD is local.
        rate: What the learning rate is multiplied by.
        algorithm: What tacit attaches.
    """

    way: str
    steps: int
    every: int
    seed: int
    period: int
    start: int
    rate: float = 1.0
    algorithm: str = ""


def _nothing() -> None:
    """There is nothing to do."""


def _backward(loss: Tensor) -> None:
    loss.backward()


@dataclass(frozen=True)
class Replica:
    """One rank's copy of the model, and how the peer trains it.

    Attributes:
        module: The model itself, which is evaluated.
        forward: The model as training calls it.
        optimizer: Has `zero_grad` and `step`.
        backward: Takes the loss.
        stepped: Called after each step.
        pause: Called before evaluations, in training's time.
    alone: Nobody waits for anybody at evaluations, as who waits there would keep others waiting for him.
    """

    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: Any
    backward: Callable[[Tensor], None] = _backward
    stepped: Callable[[], object] = _nothing
    pause: Callable[[], object] = _nothing
    alone: bool = False


class Bench:
    """What a peer's function is given: a fresh model and optimizer, and a place for what must stay open."""

    def __init__(self, task: Task, recipe: Recipe, stack: ExitStack) -> None:
        self.task, self.recipe, self.stack = task, recipe, stack
        self.world = dist.get_world_size()
        self.module = recipe.model(task.seed)
        self.optimizer = recipe.optimizer(self.module)
        for group in self.optimizer.param_groups:
            group["lr"] *= task.rate

    def ddp(self, **options: Any) -> DistributedDataParallel:
        """The model in DDP."""
        return DistributedDataParallel(self.module, gradient_as_bucket_view=True, **options)


# ---- tacit, and what is in torch ----------------------------------------------------------------------


def tacit(bench: Bench) -> Replica:
    from tacit.api.attach import attach

    model = bench.ddp()
    session = bench.stack.enter_context(attach(model, bench.optimizer, bench.task.algorithm))
    return Replica(bench.module, model, bench.optimizer, pause=session.flush)


def ddp(bench: Bench) -> Replica:
    return Replica(bench.module, bench.ddp(), bench.optimizer)


def _hooked(bench: Bench, hook: Any, state: object = None, **options: Any) -> Replica:
    model = bench.ddp(**options)
    model.register_comm_hook(state, hook)
    return Replica(bench.module, model, bench.optimizer)


def fp16(bench: Bench) -> Replica:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return _hooked(bench, fp16_compress_hook)


def bf16(bench: Bench) -> Replica:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return _hooked(bench, bf16_compress_hook)


def int8(bench: Bench) -> Replica:
    from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook

    return _hooked(bench, quantization_pertensor_hook)


def powersgd(bench: Bench) -> Replica:
    """In one bucket: 25 MB hold the model, and a size that is given is that of the first bucket too."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    return _hooked(bench, powerSGD_hook, _powersgd_state(), bucket_cap_mb=25)


def powersgd_buckets(bench: Bench) -> Replica:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    return _hooked(bench, powerSGD_hook, _powersgd_state())


def powersgd_batched(bench: Bench) -> Replica:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import batched_powerSGD_hook

    return _hooked(bench, batched_powerSGD_hook, _powersgd_state(), bucket_cap_mb=25)


def _powersgd_state() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    # 2 is the least that it takes with error feedback.
    return PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def postlocal(bench: Bench) -> Replica:
    """Its averager averages in the first step after the warm-up; with one step less, rounds are as many."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    start = bench.task.start - 1
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=start)
    replica = _hooked(bench, post_localSGD_hook, state)
    averager = PeriodicModelAverager(period=bench.task.period, warmup_steps=start)
    return Replica(replica.module, replica.forward, PostLocalSGDOptimizer(bench.optimizer, averager))


# ---- torchft ------------------------------------------------------------------------------------------


def _manager(bench: Bench) -> Any:
    """A replica group of one rank for each node; the lighthouse is in the process of rank 0."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    address = [""]
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=bench.world)
        bench.stack.callback(lighthouse.shutdown)
        address = [lighthouse.address()]
    dist.broadcast_object_list(address)
    host = socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    bench.stack.callback(id, store)  # held as long as the manager
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=bench.world,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"node{dist.get_rank()}",
        hostname=host,
        init_sync=False,  # all replicas begin with equal weights
    )
    bench.stack.callback(manager.shutdown)
    return manager


def torchft_localsgd(bench: Bench) -> Replica:
    from torchft.local_sgd import LocalSGD

    bench.stack.enter_context(LocalSGD(_manager(bench), bench.module, bench.optimizer, bench.task.period))
    return Replica(bench.module, bench.module, bench.optimizer)


def torchft_diloco(bench: Bench) -> Replica:
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(bench.module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    bench.stack.enter_context(
        DiLoCo(_manager(bench), [bench.module], bench.optimizer, outer, bench.task.period)
    )
    return Replica(bench.module, bench.module, bench.optimizer)


# ---- Accelerate, DeepSpeed, hivemind, detonation ------------------------------------------------------


def accelerate_localsgd(bench: Bench) -> Replica:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(bench.module, bench.optimizer)
    local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=bench.task.period)
    bench.stack.enter_context(local)
    return Replica(bench.module, model, optimizer, accelerator.backward, local.step)


def deepspeed_bf16(bench: Bench) -> Replica:
    """ZeRO's stage 0, which is data parallel; gradients travel in bf16 when backward is over."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": bench.recipe.batch, "communication_data_type": "bf16"}
    engine, *_ = deepspeed.initialize(
        model=bench.module, optimizer=bench.optimizer, config=config, dist_init_required=False
    )
    return Replica(bench.module, engine, engine, engine.backward)


def hivemind_local(bench: Bench) -> Replica:
    """Its peers average in the foreground, as others do; they have 3 s to find each other, as it advises."""
    import hivemind
    from hivemind.p2p import P2P

    # It writes /tmp, and leaves its sockets there if it is killed.
    P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"
    host = socket.gethostbyname(socket.gethostname())
    places: list[list[str]] = [[]]

    def join(initial: list[str]) -> Any:
        return hivemind.DHT(
            host_maddrs=[f"/ip4/{host}/tcp/0"], initial_peers=initial, start=True, startup_timeout=60
        )

    if dist.get_rank() == 0:
        dht = join([])
        places = [[str(each) for each in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(places)
    if dist.get_rank() != 0:
        dht = join(places[0])
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="digits",
        batch_size_per_step=bench.recipe.batch,
        target_batch_size=bench.recipe.batch * bench.world * bench.task.period,
        optimizer=bench.optimizer,
        use_local_updates=True,
        delay_state_averaging=False,
        matchmaking_time=3.0,
        averaging_timeout=15.0,  # who has found nobody by then trains on
        averager_opts={"request_timeout": 1.0},  # less than the time for matchmaking, as it advises
    )
    return Replica(bench.module, bench.module, optimizer, alone=True)


def demo(bench: Bench) -> Replica:
    return _detonation(bench, list(bench.module.parameters()))


def demo_matrices(bench: Bench) -> Replica:
    """It takes tensors of one and two dimensions only."""
    parameters = list(bench.module.parameters())
    matrices = [nn.Parameter(p.data.flatten(1) if p.dim() > 2 else p.data) for p in parameters]
    replica = _detonation(bench, matrices)
    step = replica.optimizer.step

    def hand_over() -> None:
        for parameter, matrix in zip(parameters, matrices, strict=True):
            assert parameter.grad is not None
            matrix.grad = parameter.grad.view_as(matrix)
            parameter.grad = None
        step()

    replica.optimizer.step = hand_over
    return replica


def _detonation(bench: Bench, parameters: list[nn.Parameter]) -> Replica:
    from detonation import DeMoReplicator, DeToSGD

    alone, _ = dist.new_subgroups(group_size=1)
    optimizer = DeToSGD(
        parameters,
        lr=0.001 * bench.task.rate,
        sharding_parallel_group=alone,
        replication_parallel_group=dist.group.WORLD,
        replicator=DeMoReplicator(compression_topk=32, compression_chunk=64),
    )
    return Replica(bench.module, bench.module, optimizer)


WAYS: Mapping[str, Callable[[Bench], Replica]] = {
    way.__name__: way
    for way in (
        *(tacit, ddp, fp16, bf16, int8, powersgd, powersgd_buckets, powersgd_batched, postlocal),
        *(torchft_localsgd, torchft_diloco, accelerate_localsgd, deepspeed_bf16, hivemind_local),
        *(demo, demo_matrices),
    )
}


# ---- training -----------------------------------------------------------------------------------------


def train(task: Task, recipe: Recipe, replica: Replica) -> dict[str, object]:
    """Train to the end; evaluations are at the same steps for all, and in nobody's time."""
    meter = Meter()
    evaluations = (_evaluated_alone if replica.alone else _evaluated)(task, recipe, replica, meter)
    nodes = int(os.environ.get("TACIT_NODES", "1"))
    return {
        "seconds": evaluations[-1]["seconds"],
        "congestion_control": congestion_control(),
        "evaluations": evaluations,
        "mb_per_node": None if meter.transmitted is None else meter.transmitted / nodes / 1e6,
        "apart": apart(replica.module),
        "peak_mb": _largest(peak_bytes() / 1e6),
    }


def _evaluated(task: Task, recipe: Recipe, replica: Replica, meter: Meter) -> list[dict[str, float]]:
    batches = endless(recipe, task.seed)
    evaluations = []
    for first in range(0, task.steps, task.every):
        last = min(first + task.every, task.steps)
        with meter.window():
            for _ in range(first, last):
                _step(recipe, replica, *next(batches))
            replica.pause()
        loss, accuracy = mean_over_ranks(*recipe.evaluate(replica.module))
        evaluations.append({"step": last, "seconds": meter.seconds, "loss": loss, "accuracy": accuracy})
    return evaluations


def _evaluated_alone(task: Task, recipe: Recipe, replica: Replica, meter: Meter) -> list[dict[str, float]]:
    batches = endless(recipe, task.seed)
    mine = []
    with meter.window():
        start = time.perf_counter()
        for step in range(1, task.steps + 1):
            _step(recipe, replica, *next(batches))
            if step % task.every == 0 or step == task.steps:
                seconds = time.perf_counter() - start
                mine.append((step, seconds, *recipe.evaluate(replica.module)))
                start += time.perf_counter() - start - seconds
    evaluations = []
    for step, seconds, *found in mine:
        loss, accuracy = mean_over_ranks(*found)
        evaluations.append({"step": step, "seconds": _largest(seconds), "loss": loss, "accuracy": accuracy})
    return evaluations


def endless(recipe: Recipe, seed: int) -> Iterator[Batch]:
    """This rank's batches, epoch after epoch."""
    place = dist.get_rank(), dist.get_world_size()
    return chain.from_iterable(recipe.train_batches(epoch, *place, seed) for epoch in count())


def _step(recipe: Recipe, replica: Replica, inputs: Tensor, targets: Tensor) -> None:
    replica.optimizer.zero_grad()
    replica.backward(recipe.loss(replica.forward(inputs), targets))
    replica.optimizer.step()
    replica.stepped()


def apart(module: nn.Module) -> float:
    """How far the replicas are from each other: the largest difference of one parameter."""
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    low, high = flat.clone(), flat
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return float((high - low).max())


def _largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def peak_bytes() -> int:
    """The most memory that this process and those below it have held, each at its own time."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(_high_water(pid) for pid in family)


def _high_water(pid: int) -> int:
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else 0


def main() -> None:
    """Train as one rank; what a peer has opened ends with the process, in whatever state its threads are."""
    code = 1
    stack = ExitStack()  # never closed
    try:
        task = Task(**json.loads(sys.argv[1]))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=PATIENCE)
        recipe = recipes.get("digits")
        found = train(task, recipe, WAYS[task.way](Bench(task, recipe, stack)))
        dist.barrier()
        if dist.get_rank() == 0:
            tell(found)
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
