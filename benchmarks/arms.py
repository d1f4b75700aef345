"""What the benchmarks time: a model at work, such as one VGG-11, and a way to exchange gradients; an arm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tacit
from paired import Arm, interleave
from runs import COMPUTE_ONLY
from tacit_lab.recipes.models.vgg import vgg11
from tacit_lab.testbed.network import counters

BATCH = 32
ONE_BUCKET = 1 << 10
"""MiB that hold the whole model: DDP keeps to one bucket."""


@contextmanager
def ranks(seconds: float = 300) -> Iterator[int]:
    """This process as one of the group's ranks, of one thread, over Gloo: its number.

    Nobody leaves before all are done; `seconds` is how long anybody waits.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Work:
    """What a step is made of.

    Attributes:
        batch: gives the next inputs and targets.
        loss: of outputs and targets.
    """

    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def on_images(mixed: bool, batch: int) -> Work:
    """VGG-11 on one batch of random images of 32x32 pixels, in colour."""
    layout = torch.channels_last if mixed else torch.contiguous_format
    model = vgg11().to(memory_format=layout)  # type: ignore[call-overload]  # torch takes it
    x = torch.randn(batch, 3, 32, 32).to(memory_format=layout)
    y = torch.randint(0, 10, (batch,))
    return Work(model, momentum_sgd, lambda: (x, y), nn.CrossEntropyLoss())


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of a small rate: all arms see one batch again and again, and outer steps must not blow it up."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


class Trainer:
    """A model, its optimizer and an algorithm; one arm.

    Args:
        arm: "compute-only" (no DDP), "ddp" (torch alone: tacit is never attached), "noop" (a hook that
            exchanges nothing), "near-only" (torch's DDP among the ranks of a node, nothing between nodes),
            "closed" (attached, one step, closed), "torch:powersgd" (torch's own hook), or what `tacit.attach`
            takes.
        mixed: forward in bf16 autocast with convolutions in channels-last; parameters and gradients in fp32.
        batch: images a rank and step.
        bucket_cap_mb: DDP's; None: its default. `ONE_BUCKET` is what torch's PowerSGD needs on Gloo.
        epochs: how many, and of how many steps, for what goes by them.
        work: what is trained in place of the VGG-11; `batch` then says nothing.
    """

    def __init__(
        self,
        arm: str,
        mixed: bool = False,
        batch: int = BATCH,
        bucket_cap_mb: float | None = None,
        epochs: tuple[int, int] | None = None,
        work: Work | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.work = work or on_images(mixed, batch)
        self.model = self.work.model
        self.mixed = mixed
        self.session: tacit.Attached | None = None
        self.epochs = epochs
        self.sent: list[int] = []
        self.exposed: list[float] = []
        if arm != COMPUTE_ONLY:
            self.model = DistributedDataParallel(
                self.model,
                gradient_as_bucket_view=True,
                bucket_cap_mb=bucket_cap_mb,
                process_group=_node() if arm == "near-only" else None,
                init_sync=False,  # all begin with equal weights
            )
        self.optimizer = self.work.optimizer(self.model)
        if isinstance(self.model, DistributedDataParallel):
            _ENTER.get(arm, lambda trainer, model: trainer.attach(model, arm))(self, self.model)

    def attach(self, model: DistributedDataParallel, algorithm: str) -> None:
        """Put tacit to work."""
        count, steps = self.epochs or (None, None)
        self.session = tacit.attach(model, self.optimizer, algorithm, epochs=count, steps_per_epoch=steps)

    def close(self) -> None:
        """End the session, where there is one."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def step(self) -> None:
        """One step of the user's loop."""
        before = counters.transmitted(os.environ["TACIT_INTERFACE"])
        x, y = self.work.batch()
        with self._autocast():
            loss = self.work.loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        if self.session is not None:
            self.session.observe(loss.detach())
        self.optimizer.step()
        self.sent.append(counters.transmitted(os.environ["TACIT_INTERFACE"]) - before)
        if self.session is not None and self.session.session.stats.records:
            self.exposed.append(self.session.session.stats.records[-1].exposed_seconds)

    def steps(self, count: int) -> None:
        """So many steps, and the end of what is under way after them."""
        for _ in range(count):
            self.step()
        if self.session is not None:
            self.session.flush()

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.mixed)


@dataclass
class Blocks:
    """Blocks of a trainer's steps.

    Attributes:
        steps: of a block.
        sent: the bytes that this node's interface has sent in each block, with the end of what was under way.
    """

    trainer: Trainer
    steps: int
    sent: list[int] = field(default_factory=list)

    def take(self) -> None:
        """One block."""
        before = counters.transmitted(os.environ["TACIT_INTERFACE"])
        self.trainer.steps(self.steps)
        self.sent.append(counters.transmitted(os.environ["TACIT_INTERFACE"]) - before)

    @property
    def megabytes(self) -> float:
        """10^6 bytes a step."""
        return sum(self.sent) / len(self.sent) / self.steps / 1e6


def timed(arms: Mapping[str, Blocks], blocks: int) -> dict[str, list[float]]:
    """So many blocks of each, interleaved: seconds a step of each block, as of `on_all_ranks`."""
    seconds = on_all_ranks({name: Arm(each.take, 1, 0) for name, each in arms.items()}, blocks)
    return {name: [each / arms[name].steps for each in seconds[name]] for name in arms}


def on_all_ranks(
    arms: Mapping[str, Arm], blocks: int, fence: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """`interleave`, whose blocks begin together; of each block the seconds of the rank that took longest.

    Where ranks share cores and do not wait for each other, the first may end long before the last.
    `fence`: what has them begin together; None: a barrier.
    """
    seconds = interleave(arms, blocks, fence or dist.barrier)
    longest = torch.tensor([seconds[name] for name in arms], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return dict(zip(arms, longest.tolist(), strict=True))


def _node() -> dist.ProcessGroup:
    """The ranks of this node."""
    mine, _ = dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _leave_alone(trainer: Trainer, model: DistributedDataParallel) -> None:
    """Plain DDP."""


def _exchange_nothing(trainer: Trainer, model: DistributedDataParallel) -> None:
    def answer(_, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations that are no texts, or none
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, answer)


def _attach_and_close(trainer: Trainer, model: DistributedDataParallel) -> None:
    trainer.attach(model, "topk:ratio=0.01")
    trainer.step()
    trainer.close()
    trainer.exposed.clear()


def _torch_powersgd(trainer: Trainer, model: DistributedDataParallel) -> None:
    """Torch's hook with what `powersgd:rank=2` has: error feedback, warm start, compressed from the start."""
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,  # the smallest it takes
        min_compression_rate=2,
        use_error_feedback=True,
        warm_start=True,
    )
    model.register_comm_hook(state, powerSGD_hook)


_ENTER: Mapping[str, Callable[[Trainer, DistributedDataParallel], None]] = MappingProxyType(
    {
        "ddp": _leave_alone,
        "near-only": _leave_alone,
        "noop": _exchange_nothing,
        "closed": _attach_and_close,
        "torch:powersgd": _torch_powersgd,
    }
)
