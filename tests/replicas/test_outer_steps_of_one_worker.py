"""An outer optimizer over one worker, in a process group of one rank, against the papers' lines."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import tacit

STEPS = 11


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def adamw(net: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(net.parameters(), lr=0.05)]


def muon(net: nn.Module) -> list[Optimizer]:
    """As MuLoCo's authors: Muon for matrices, AdamW for the rest."""
    matrices = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def step(net: nn.Module, optimizers: Sequence[Optimizer], t: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(x).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def by_hand(
    net: nn.Module, optimizers: Sequence[Optimizer], k: int, eta: float, mu: float
) -> list[list[Tensor]]:
    """After each step: K inner steps; s <- w - w'; b <- mu b + s; w <- w - eta (mu b + s)."""
    w = [p.detach().clone() for p in net.parameters()]
    b, trace = [torch.zeros_like(each) for each in w], []
    for t in range(STEPS):
        step(net, optimizers, t)
        if (t + 1) % k == 0:
            with torch.no_grad():
                for p, slow, v in zip(net.parameters(), w, b, strict=True):
                    s = slow - p
                    v.mul_(mu).add_(s)
                    slow.sub_(eta * (mu * v + s))
                    p.copy_(slow)
        trace.append([p.detach().clone() for p in net.parameters()])
    return trace


@pytest.mark.parametrize(
    ("text", "build", "k", "eta", "mu"),
    [
        ("snoo:sync_every=3", adamw, 3, 0.8, 0.75),
        ("snoo:sync_every=2,outer_lr=0.5,outer_momentum=0.0", adamw, 2, 0.5, 0.0),
        ("muloco:sync_every=4", muon, 4, 0.7, 0.6),
    ],
)
def test_the_trajectory_is_the_papers(
    text: str, build: Callable[[nn.Module], list[Optimizer]], k: int, eta: float, mu: float
) -> None:
    net = network()
    plain = copy.deepcopy(net)
    expected = by_hand(plain, build(plain), k, eta, mu)
    model = DDP(net)
    optimizers = build(model.module)
    with tacit.attach(model, optimizers, text) as session:
        for t in range(STEPS):
            step(model, optimizers, t)
            for p, reference in zip(net.parameters(), expected[t], strict=True):
                torch.testing.assert_close(p.detach(), reference, rtol=0, atol=1e-12)
    assert session.metrics()["bytes_out"] == 0


def test_a_run_that_is_saved_and_resumed_is_the_run_that_never_stopped() -> None:
    text = "snoo:sync_every=4"
    model = DDP(network())
    (optimizer,) = adamw(model)
    saved: list[io.BytesIO] = []
    with tacit.attach(model, optimizer, text) as session:
        for t in range(STEPS):
            if t == 6:
                for each in (model.module, optimizer, session):
                    saved.append(io.BytesIO())
                    torch.save(each.state_dict(), saved[-1])
            step(model, [optimizer], t)
    again = DDP(network())
    (other,) = adamw(again)
    with tacit.attach(again, other, text) as session:
        for each, file in zip((again.module, other, session), saved, strict=True):
            file.seek(0)
            each.load_state_dict(torch.load(file, weights_only=False))
        for t in range(6, STEPS):
            step(again, [other], t)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_without_a_process_group_the_way_to_one_is_told() -> None:
    """A model that DDP has not wrapped is refused, by what to write."""
    net = network()
    with pytest.raises(tacit.AttachError, match=r"write attach\(DistributedDataParallel\(model\)"):
        tacit.attach(net, adamw(net), "snoo")
