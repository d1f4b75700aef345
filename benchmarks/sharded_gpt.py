"""What a rank of benchmarks/doors.py does: a GPT in DDP or FSDP2, its steps, its memory and its losses."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tacit
from arms import on_all_ranks, ranks
from launched import tell
from paired import Arm
from tacit.compressors import Blockwise, ErrorFeedback
from tacit_lab.recipes.bytes import Bytes
from tacit_lab.recipes.models.gpt import GPT
from tacit_lab.testbed.network import counters

BATCH = 2
WARMUP = 20
"""Steps over which the learning rate rises."""
RATE = 1e-3
ARMS: Mapping[str, tacit.Strategy | str | None] = {
    "ddp": None,
    "near-only": None,
    "dense": "ddp",
    "int4": tacit.Strategy(compressor=ErrorFeedback(Blockwise(bits=4)), name="int4"),
    "diloco": "diloco:sync_every=32,bits=4",
    "localsgd": "localsgd:sync_every=8,bits=4",
}
BLOCKS = {"ddp": 1, "near-only": 8, "dense": 2, "int4": 8, "diloco": 32, "localsgd": 8}
"""Steps in a block: a period where there is one."""


@cache
def mesh() -> DeviceMesh:
    """Nodes x the ranks of a node."""
    mates = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh("cpu", (dist.get_world_size() // mates, mates), mesh_dim_names=("far", "near"))


class Training:
    """An arm at work.

    Args:
        arm: one of `ARMS`.
        seed: of the first weights and the order of samples.
        rate: AdamW's.
    """

    def __init__(self, arm: str, seed: int = 0, rate: float = RATE) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = GPT(vocabulary=256, length=128, width=320, heads=8, blocks=8)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        if arm == "ddp":
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh()["near"])
            fully_shard(self.model, mesh=mesh()["near"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, (0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
        )
        self.recipe, self.seed = Bytes(), seed
        self.recipe.batch = BATCH
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(())
        strategy = ARMS[arm]
        self.session = (
            None if strategy is None else tacit.attach(self.model, self.optimizer, strategy, mesh=mesh())
        )

    def step(self) -> None:
        """One step of the user's loop."""
        x, y = self._batch()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()

    def _batch(self) -> tuple[Tensor, Tensor]:
        found = next(self.batches, None)
        if found is None:
            world, rank = dist.get_world_size(), dist.get_rank()
            self.batches = self.recipe.train_batches(self.schedule.last_epoch, rank, world, self.seed)
            found = next(self.batches)
        return found

    def close(self) -> None:
        """End the session, where there is one."""
        if self.session is not None:
            self.session.close()


def timed(blocks: int) -> None:
    """Seconds a step of every arm, interleaved, and the bytes that this node's interface sent."""
    with ranks(600) as rank:
        arms = {name: Training(name) for name in ARMS}
        sent: dict[str, list[int]] = {name: [] for name in ARMS}

        def block(name: str) -> None:
            before = counters.transmitted(os.environ["TACIT_INTERFACE"])
            for _ in range(BLOCKS[name]):
                arms[name].step()
            dist.barrier()
            sent[name].append(counters.transmitted(os.environ["TACIT_INTERFACE"]) - before)

        for name, arm in arms.items():
            for _ in range(1 if name in ("ddp", "dense") else 4):
                arm.step()
        for name in ("diloco", "localsgd"):
            while arms[name].schedule.last_epoch % BLOCKS[name]:
                arms[name].step()  # a block ends with a round
        seconds = on_all_ranks({name: Arm(partial(block, name), 1, 0) for name in arms}, blocks)
        if rank == 0:
            tell(
                {
                    name: {
                        "step_seconds": [each / BLOCKS[name] for each in seconds[name]],
                        "mb_per_step_and_node": sum(sent[name]) / len(sent[name]) / BLOCKS[name] / 1e6,
                        "parameters": arms[name].parameters,
                    }
                    for name in arms
                }
            )
        for arm in arms.values():
            arm.close()


def memory(name: str) -> None:
    """How many bytes this process has risen by at most, over four steps or a round."""
    with ranks() as rank:
        _first_use()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        arm = Training(name)
        for _ in range(max(4, BLOCKS[name])):
            arm.step()
        rise = torch.tensor([_status("VmHWM") - before], dtype=torch.float64)
        own = sum(arm.session.footprint().values()) if arm.session is not None else 0
        dist.all_reduce(rise, dist.ReduceOp.MAX)
        if rank == 0:
            tell({"peak_mb": rise.item() / 1e6, "own_mb": own / 1e6})
        arm.close()


def _first_use() -> None:
    """Whatever torch loads when something is used at first is no arm's."""
    small = nn.Linear(8, 8)
    fully_shard(small, mesh=mesh()["near"])
    optimizer = torch.optim.AdamW(small.parameters())
    with tacit.attach(small, optimizer, "diloco:sync_every=1,bits=4", mesh=mesh()):
        small(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def losses(name: str, seed: int, rate: float, steps: int) -> None:
    """The loss on held-out files after so many steps, nats a byte; of diloco, of the common point."""
    with ranks() as rank:
        arm = Training(name, seed, rate)
        for _ in range(steps):
            arm.step()
        arm.close()
        arm.model.eval()
        loss, accuracy = arm.recipe.evaluate(arm.model)
        if rank == 0:
            told: dict[str, Any] = {"loss": loss if math.isfinite(loss) else None, "accuracy": accuracy}
            tell(told)
