"""Rows: how models are built."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from user_script import GRADIENTS, STEPS, TABLE, TIMED, Script


def trained(script: Script, net: nn.Module, **options: Any) -> nn.Module:
    model = script.wrapped(net, **options)
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model


def between(layer: nn.Module) -> nn.Module:
    """A network with this layer in it."""
    return nn.Sequential(nn.Linear(12, 24), layer, nn.Tanh(), nn.Linear(24, 4))


@TABLE.add()
def dropout(script: Script) -> nn.Module:
    """Numbers that were drawn are those of the script without a session."""
    return trained(script, between(nn.Dropout(0.2)))


@TABLE.add()
def batch_norm(script: Script) -> nn.Module:
    return trained(script, between(nn.BatchNorm1d(24)))


@TABLE.add()
def batch_norm_of_each_rank_alone(script: Script) -> nn.Module:
    """DDP leaves the running statistics alone."""
    net = between(nn.BatchNorm1d(24))
    return trained(script, net, broadcast_buffers=False)


class Synchronized(nn.Module):
    """Norms by the statistics of all ranks, which it asks them for in forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        sums = torch.cat([x.mean(0), x.square().mean(0)])
        mean, square = (collective.all_reduce(sums) / dist.get_world_size()).chunk(2)
        return (x - mean) / (square - mean.square() + 1e-3).sqrt()


@TABLE.add(learns=False)
def batch_norm_over_all_ranks(script: Script) -> nn.Module:
    return trained(script, between(Synchronized()))


@TABLE.add()
def tied_weights(script: Script) -> nn.Module:
    net = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 4))
    net[2].weight = net[0].weight
    return trained(script, net)


@TABLE.add()
def frozen_layers(script: Script) -> nn.Module:
    net = script.net()
    net[0].requires_grad_(False)
    return trained(script, net)


class Sometimes(nn.Module):
    """A layer that the passes of one rank and then of the other leave out, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom, self.never = nn.Linear(24, 24), nn.Linear(24, 24)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        skips = self.training and self.passes % 3 == dist.get_rank()
        return x if skips else x + self.seldom(x)


@TABLE.add()
def unused_parameters(script: Script) -> nn.Module:
    return trained(script, between(Sometimes()), find_unused_parameters=True)


@TABLE.add()
def static_graph(script: Script) -> nn.Module:
    return trained(script, script.net(), static_graph=True)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


@TABLE.add()
def gradient_checkpointing(script: Script) -> nn.Module:
    return trained(script, between(Recomputed()))


class Pictures(nn.Module):
    """Convolves the numbers as pictures of 2 x 2, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stack(x.view(-1, 3, 2, 2).to(memory_format=torch.channels_last))
        return y


@TABLE.add()
def channels_last(script: Script) -> nn.Module:
    return trained(script, Pictures().to(memory_format=torch.channels_last))  # type: ignore[call-overload]


class Rows(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 24, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.rows((x[:, :3] > 0).long() @ torch.tensor([1, 2, 4]))
        return y


@TABLE.add()
def embeddings(script: Script) -> nn.Module:
    return trained(script, between(Rows(sparse=False)))


@TABLE.add(without={"onebit-adam"}, says={"has sparse gradients": GRADIENTS | TIMED})
def sparse_embeddings(script: Script) -> nn.Module:
    model = script.wrapped(between(Rows(sparse=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(13, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=24)


@TABLE.add(says={"complex": GRADIENTS | TIMED | {"lowbit", "diloco", "localsgd", "gossip"}})
def complex_parameters(script: Script) -> nn.Module:
    return trained(script, between(Waves()))


class Head(nn.Module):
    """Has a part of its model in DDP, behind one that is the same on all ranks and is not trained."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12).requires_grad_(False)
        self.head = script.wrapped(script.net())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x + 0.1 * self.body(x))
        return y


@TABLE.add()
def ddp_of_a_part(script: Script) -> nn.Module:
    model = Head(script)
    optimizer = script.optimizer(model)
    with script.attached(model.head, optimizer):
        script.train(model, optimizer)
    return model.head


# The first compilation of a process takes seconds.
@TABLE.add(without={"ddp", "powersgd", "lowbit", "diloco", "onebit-adam", "gossip", "auto"})
def compiled_behind_attach(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(torch.compile(model, backend="eager"), optimizer)  # type: ignore[arg-type]
    return model


def hooked(script: Script, behind: bool) -> nn.Module:
    """The user's own hooks on gradients: one clips each gradient, one counts."""
    model = script.wrapped()
    optimizer, counted = script.optimizer(model), []

    def register() -> None:
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
            p.register_post_accumulate_grad_hook(lambda p: counted.append(1))

    if not behind:
        register()
    with script.attached(model, optimizer):
        if behind:
            register()
        script.train(model, optimizer)
    assert len(counted) == STEPS * 4, f"{len(counted)} calls of a hook for 4 parameters"
    return model


@TABLE.add()
def gradient_hooks_from_before_attach(script: Script) -> nn.Module:
    return hooked(script, behind=False)


@TABLE.add()
def gradient_hooks_from_behind_attach(script: Script) -> nn.Module:
    return hooked(script, behind=True)


class Counting(nn.Module):
    """Has a buffer that is another tensor after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + self.training
        return x


@TABLE.add()
def buffers_made_in_forward(script: Script) -> nn.Module:
    return trained(script, between(Counting()))
