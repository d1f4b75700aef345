"""Moments averaged in periods of their own (DES-LOC), against the paper's lines over plain optimizers."""

from typing import Any

import torch
from loopback_training import Member
from model_features import Feature, Net
from torch import Tensor, nn

from cases import for_each
from in_threads import in_threads
from tacit.transports.loopback import Loopback

P, STEPS = 3, 11
FIRST = {"exp_avg", "momentum_buffer"}


def double() -> nn.Module:
    return Net(dtype=torch.float64)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def kept(net: nn.Module, optimizer: torch.optim.Optimizer, first: bool) -> list[Tensor]:
    return [
        value
        for p in net.parameters()
        for field, value in optimizer.state[p].items()
        if value.shape == p.shape and (field in FIRST) == first
    ]


@torch.no_grad()
def mean_(each: list[list[Tensor]]) -> None:
    for same in zip(*each, strict=True):
        average = torch.stack(same).mean(0)
        for tensor in same:
            tensor.copy_(average)


def raise_(optimizer: torch.optim.Optimizer) -> None:
    """Second moments to the least that they are beside first ones, whatever the gradients were."""
    for state in optimizer.state.values():
        for field in {"exp_avg_sq", "max_exp_avg_sq"} & state.keys():
            least = 0.001 * (1 - 0.9**2 / 0.999) / 0.1**2 * state["exp_avg"] ** 2
            state[field].copy_(torch.maximum(state[field], least))


def passed(net: nn.Module, rank: int, step: int) -> None:
    data = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=data), torch.randint(0, 5, (8,), generator=data)
    nn.functional.cross_entropy(net(x), y).backward()


@for_each("build", [adam, sgd])
@for_each("periods", [(2, 3, 5), (3, 1, 2), (2, 6, 12)])
def test_the_trajectory_is_the_papers(
    build: type[torch.optim.Optimizer], periods: tuple[int, int, int]
) -> None:
    k_x, k_u, k_v = periods
    nets = [double() for _ in range(P)]
    optimizers = [build(net) for net in nets]
    text = f"desloc:sync_every={k_x},first_every={k_u},second_every={k_v}"
    net = Loopback(P)
    crew = [Member(rank, Feature(double, build), text, [net]) for rank in range(P)]  # type: ignore[arg-type]
    for step in range(STEPS):
        for rank in range(P):
            for model, optimizer in ((nets[rank], optimizers[rank]), (crew[rank].net, crew[rank].optimizer)):
                optimizer.zero_grad()
                passed(model, rank, step)
            optimizers[rank].step()
        in_threads(P, lambda rank, step=step: crew[rank].step(step, set()))
        if (step + 1) % k_x == 0:
            mean_([list(each.parameters()) for each in nets])
        for period, first in ((k_u, True), (k_v, False)):
            if (step + 1) % period == 0:
                mean_([kept(*both, first) for both in zip(nets, optimizers, strict=True)])
        if (step + 1) % k_u == 0 and (step + 1) % k_v:
            for optimizer in optimizers:
                raise_(optimizer)
        for mine, theirs, optimizer in zip(crew, nets, optimizers, strict=True):
            pairs: list[Any] = [(mine.net.parameters(), theirs.parameters())]
            pairs += [
                (kept(mine.net, mine.optimizer, each), kept(theirs, optimizer, each))
                for each in (True, False)
            ]
            for found, expected in pairs:
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    in_threads(P, lambda rank: crew[rank].levels[0].consolidate())
    held = [[*kept(mine.net, mine.optimizer, True), *kept(mine.net, mine.optimizer, False)] for mine in crew]
    for same in zip(*held, strict=True):
        assert all(torch.equal(same[0], each) for each in same), "what is local is averaged at the end"
    for mine in crew:
        mine.close()


@for_each("kind", [torch.optim.AdamW, torch.optim.Adamax])
def test_no_step_divides_by_nothing_where_first_moments_are_averaged_alone(kind: Any) -> None:
    """The second rank's gradients begin behind the average, and Adam's own steps are of 7 rates at most."""
    net, ones = Loopback(2), torch.ones(12)
    build = Feature(Net, lambda net: kind(net.parameters(), lr=1e-3))  # type: ignore[arg-type]
    crew = [
        Member(rank, build, "desloc:sync_every=50,first_every=2,second_every=4", [net]) for rank in range(2)
    ]
    for step in range(3):
        before = [[p.detach().clone() for p in mine.net.parameters()] for mine in crew]
        for rank, mine in enumerate(crew):
            mine.optimizer.zero_grad()
            (mine.net(ones[None]).sum() * (rank == 0)).backward()
        in_threads(2, lambda rank, step=step: crew[rank].step(step, set()))
        for mine, old in zip(crew, before, strict=True):
            pairs = zip(mine.net.parameters(), old, strict=True)
            assert max(float((p.detach() - was).abs().max()) for p, was in pairs) < 8e-3
    for mine in crew:
        mine.close()
