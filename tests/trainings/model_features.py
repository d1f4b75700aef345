"""What models and scripts have: each feature as a model, an optimizer, and how a step is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

CAP = 0.001
"""MiB of a bucket: several of them, as large models have."""
STEPS = 6
"""Buckets settle on DDP's buckets in the fourth round."""


def plain() -> nn.Module:
    return nn.Linear(24, 24)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24))


class Net(nn.Module):
    """A small network; what a feature changes, it changes here."""

    def __init__(self, middle: Callable[[], nn.Module] = plain, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(12, 24), middle()
        self.last = nn.Linear(24, 5)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x.to(self.last.weight.dtype)).relu()).relu())
        return y


class Masked(nn.Module):
    """Adds a mask of minus infinity above the diagonal, and a table that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.register_buffer("mask", torch.full((24, 24), -torch.inf).triu(1))
        self.register_buffer("table", torch.linspace(0, 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).unsqueeze(1) * self.table + self.mask
        return scores.softmax(-1).mean(1) + x


class Sometimes(nn.Module):
    """Has a layer that every third pass uses, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom, self.never = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.often(x)
        if self.passes % 3 == 0:
            y = y + self.seldom(x)
        self.passes += 1
        return y


class Tied(nn.Module):
    """One matrix twice, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.b(self.a(x).relu()))
        return y


class Looked(nn.Module):
    """An embedding with sparse gradients, by the signs of the first entries."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 24, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4])
        y: Tensor = x + self.rows(index)
        return y


class Rare(nn.Module):
    """An embedding, of which half of the rows have a gradient in the third pass alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 24)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] > 0).long() + 2 * (self.passes == 2)
        self.passes += 1
        y: Tensor = x + self.rows(index)
        return y


class Recomputed(nn.Module):
    """Is computed once more in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def grouped(net: nn.Module) -> Optimizer:
    first, *others = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [first], "lr": 0.01, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def nothing(net: nn.Module, step: int) -> None:
    """Between two steps nothing happens."""


def reassigned(net: nn.Module, step: int) -> None:
    """Parameters get other memory, as from averages of weights, and so do running statistics."""
    if step in (2, 4):
        for p in net.parameters():
            p.data = p.data.clone()
        for module in net.modules():
            for name, b in [*module.named_buffers(recurse=False)]:
                setattr(module, name, b.clone())


def thawed(net: nn.Module, step: int) -> None:
    """A layer that was frozen trains from now on."""
    if step == 1:
        for p in net.first.parameters():  # type: ignore[union-attr]
            p.requires_grad_(True)


def half_frozen() -> nn.Module:
    net = Net()
    net.first.requires_grad_(False)
    return net


@dataclass(frozen=True)
class Feature:
    """What is special about a model, or about the script that trains it.

    Attributes:
        net: makes the model, with the same weights every time.
        optimizer: of it.
        ddp: options of DistributedDataParallel; buckets of `CAP` where they do not say.
        micro: backward passes a step; `synced`: whether all of them are synchronised.
        clip: the largest norm of the mean gradient.
        scaled: whether a GradScaler is at work.
        schedule: what the learning rates are multiplied by, step by step.
        after: called between two steps.
        around: what is done to the DDP object before it is called.
        tolerance: of the parameters' differences, relative to how far they have moved.
        most: how far any of them may move.
    """

    net: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    ddp: dict[str, Any] = field(default_factory=dict)
    micro: int = 1
    synced: bool = False
    clip: float | None = None
    scaled: bool = False
    schedule: Sequence[float] = ()
    after: Callable[[nn.Module, int], None] = nothing
    around: Callable[[nn.Module], nn.Module] = lambda ddp: ddp
    tolerance: float = 1e-4
    most: float = math.inf

    @property
    def cap(self) -> float:
        """MiB of a bucket."""
        return float(self.ddp.get("bucket_cap_mb", CAP))


def compiled(net: nn.Module) -> nn.Module:
    module: nn.Module = torch.compile(net, backend="eager")  # type: ignore[assignment]
    return module


FEATURES = {
    "views of buckets": Feature(ddp={"gradient_as_bucket_view": True}),
    "gradients of their own": Feature(ddp={"gradient_as_bucket_view": False}),
    "batch norm": Feature(net=lambda: Net(normed)),
    "tied and frozen": Feature(net=lambda: Net(Tied)),
    "thawed": Feature(net=half_frozen, after=thawed),
    "used now and then": Feature(net=lambda: Net(Sometimes), ddp={"find_unused_parameters": True}),
    "static graph": Feature(ddp={"static_graph": True}),
    "re-assigned": Feature(net=lambda: Net(normed), after=reassigned),
    "sparse": Feature(
        net=lambda: Net(Looked), optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05)
    ),
    "infinite buffers": Feature(net=lambda: Net(Masked)),
    "accumulated": Feature(micro=3),
    "accumulated, all synchronised": Feature(micro=2, synced=True),
    "clipped": Feature(clip=0.3),
    "scaled": Feature(scaled=True),
    "weight decay": Feature(
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    ),
    "Adam": Feature(optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.05, eps=0.1)),
    # Adam makes steps of rounding where gradients are tiny, so trajectories differ.
    "rare rows": Feature(
        net=lambda: Net(Rare),
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
        tolerance=2.0,
        most=1.0,
    ),
    "schedule": Feature(schedule=(0.1, 0.5, 1.0, 0.7, 0.3, 0.1)),
    "groups": Feature(optimizer=grouped, schedule=(1.0, 1.0, 0.5, 0.5, 0.2, 0.2)),
    "recomputed": Feature(net=lambda: Net(lambda: Recomputed(False))),
    "recomputed, reentrant": Feature(net=lambda: Net(lambda: Recomputed(True))),
    "compiled inside": Feature(net=lambda: compiled(Net()), ddp={"bucket_cap_mb": 25}),
    "compiled outside": Feature(around=compiled, ddp={"bucket_cap_mb": 25}),
    "float64": Feature(net=lambda: Net(dtype=torch.float64)),
    "bfloat16": Feature(net=lambda: Net(dtype=torch.bfloat16), tolerance=5e-2),
}


def optimizer_of(feature: Feature, algorithm: str, net: nn.Module) -> Optimizer:
    """The feature's; or Adam with its groups, where the algorithm goes with nothing else."""
    made = feature.optimizer(net)
    if not algorithm.startswith(("onebit-adam", "zeroone-adam")) or isinstance(made, torch.optim.Adam):
        return made
    options = "params", "lr", "weight_decay"
    return torch.optim.Adam([{name: group[name] for name in options} for group in made.param_groups], eps=0.1)


def loss_of(feature: Feature, forward: nn.Module, data: torch.Generator) -> Tensor:
    """Of eight samples of this rank's own."""
    x, y = torch.randn(8, 12, generator=data), torch.randint(0, 5, (8,), generator=data)
    return nn.functional.cross_entropy(forward(x).float(), y) / feature.micro


def passes(feature: Feature, forward: nn.Module, ddp: nn.Module, data: torch.Generator, scale: Any) -> Tensor:
    """All backward passes of a step; `scale` is given each loss. Returns the last loss."""
    for i in range(feature.micro):
        quiet = isinstance(ddp, DDP) and not feature.synced and i < feature.micro - 1
        with ddp.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            loss = loss_of(feature, forward, data)
            scale(loss).backward()
    return loss.detach()


def rates(feature: Feature, optimizer: Optimizer, first: Sequence[float], step: int) -> None:
    """Set the learning rates of a step."""
    for group, lr in zip(optimizer.param_groups, first, strict=True):
        group["lr"] = lr * (feature.schedule[step] if feature.schedule else 1.0)


def flat(net: nn.Module) -> Tensor:
    """All parameters and floating-point buffers that are finite."""
    every = [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]
    return torch.cat([each.detach().double().reshape(-1) for each in every if bool(each.isfinite().all())])
