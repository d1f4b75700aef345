"""Adam's variance scaled to that of the mean gradient, against the same lines over plain tensors."""

import math
from typing import Any

import pytest
import torch
from loopback_training import Member
from model_features import Feature, Net
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import tacit
from cases import for_each
from in_threads import in_threads
from tacit.optimizer_hooks import scaled_variance
from tacit.optimizer_hooks.scaled_variance import ScaledVariance, Squares, of_others, sampled
from tacit.transports.loopback import Loopback

P, STEPS = 3, 21
TEXT = "lowbit:bits=8,sync_every=3"
KINDS: dict[str, Any] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.01, betas=(0.9, 0.9), weight_decay=0.1),
    "Adam": lambda ps: Adam(ps, lr=0.01, betas=(0.8, 0.95)),
    "L2": lambda ps: Adam(ps, lr=0.01, weight_decay=0.3),
    "amsgrad": lambda ps: Adam(ps, lr=0.01, amsgrad=True),
    "maximize": lambda ps: Adam(ps, lr=0.01, weight_decay=0.2, maximize=True),
    "fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "one by one": lambda ps: AdamW(ps, lr=0.01, foreach=False),
}


def double() -> nn.Module:
    return Net(dtype=torch.float64)


def member(rank: int, build: Any, net: Loopback, text: str = TEXT) -> Member:
    return Member(rank, Feature(double, lambda model: build(list(model.parameters()))), text, [net])


def passed(net: nn.Module, rank: int, step: int) -> None:
    data = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=data), torch.randint(0, 5, (8,), generator=data)
    nn.functional.cross_entropy(net(x), y).backward()


def scaled(each: Member) -> ScaledVariance:
    assert each.levels[0].moments is not None
    assert each.levels[0].moments.variance is not None
    return each.levels[0].moments.variance


class Expected:
    """What a replica's variances should be: a mean of its own squares, and r beside it."""

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.own: dict[str, Tensor] = {}
        self.squares: dict[str, list[float]] = {}

    def see(self, step: int, gradients: list[dict[str, Tensor]]) -> None:
        """Take the gradients of all replicas in, where they are compared behind this step."""
        if step >= 10 and (step + 1) % 8:
            return
        gap = 1 if step < 10 else (step - 9 if step < 18 else 8)
        for name in gradients[0]:
            each = torch.stack([sampled(g[name]) for g in gradients])
            now = [float(each.square().sum()) / P, float(each.mean(0).square().sum())]
            before = self.squares.get(name, [0.0, 0.0])
            kept = self.beta**gap
            self.squares[name] = [kept * b + (1 - kept) * n for b, n in zip(before, now, strict=True)]

    def share(self, name: str) -> float:
        own, common = self.squares.get(name, [0.0, 0.0])
        return min(1.0, max(1 / P, common / own)) if own else 1.0


@for_each("kind", KINDS)
def test_each_step_divides_by_the_scaled_root_and_the_state_has_its_own(kind: str) -> None:
    net, build = Loopback(P), KINDS[kind]
    crew = [member(rank, build, net) for rank in range(P)]
    beta = crew[0].optimizer.param_groups[0]["betas"][1]
    known, own = Expected(beta), [dict[str, Tensor]() for _ in range(P)]
    smallest = 1.0
    for step in range(STEPS):
        gradients, steps = [], []
        for rank, each in enumerate(crew):
            each.optimizer.zero_grad()
            passed(each.net, rank, step)
            gradients.append({name: p.grad.clone() for name, p in each.named.items() if p.grad is not None})
            # The same optimizer on copies, with the variance that the step is to divide by.
            twins = {name: nn.Parameter(p.detach().clone()) for name, p in each.named.items()}
            twin = build(list(twins.values()))
            group = twin.param_groups[0]
            for name, p in each.named.items():
                state = each.optimizer.state.get(p)
                g = gradients[-1][name]
                if not group.get("decoupled_weight_decay") and group["weight_decay"]:
                    decay = -group["weight_decay"] if group["maximize"] else group["weight_decay"]
                    g = g + decay * p.detach()
                before = own[rank].get(name, torch.zeros_like(g))
                own[rank][name] = beta * before + (1 - beta) * g.square()
                twins[name].grad = gradients[-1][name].clone()
                if state:
                    share = known.share(name)
                    smallest = min(smallest, share)
                    wanted = share * own[rank][name]
                    state = {key: value.clone() for key, value in state.items()}
                    state["exp_avg_sq"] = (wanted - (1 - beta) * g.square()) / beta
                    twin.state[twins[name]] = state
            twin.step()
            steps.append({name: p.detach() for name, p in twins.items()})
        for each, expected in zip(crew, steps, strict=True):
            each.optimizer.step()
            for name, p in each.named.items():
                torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=5e-8)
        known.see(step, gradients)
        in_threads(P, lambda rank: [level.after_step() for level in crew[rank].levels])  # type: ignore[func-returns-value]
        for rank, each in enumerate(crew):
            for name, p in each.named.items():
                found = each.optimizer.state[p]["exp_avg_sq"]
                torch.testing.assert_close(found, own[rank][name], rtol=1e-9, atol=1e-15)
                share = scaled(each).squares[name].share(P)
                assert math.isclose(share, known.share(name), rel_tol=1e-5), (name, step)
    assert smallest < 0.7, "gradients of so small batches are mostly noise"
    means = {name: sum(each[name] for each in own) / P for name in own[0]}
    in_threads(P, lambda rank: crew[rank].levels[0].consolidate())
    for each in crew:
        for name, p in each.named.items():
            found = each.optimizer.state[p]["exp_avg_sq"]
            torch.testing.assert_close(found, known.share(name) * means[name], rtol=1e-4, atol=1e-15)
        assert not each.optimizer._optimizer_step_pre_hooks
        assert not each.optimizer._optimizer_step_post_hooks
        each.close()


def test_a_variance_of_mean_gradients_becomes_the_replicas_own_and_back() -> None:
    """An optimizer that has trained with DDP: its variance is divided by r once that is known."""
    net = Loopback(P)
    crew = [member(rank, KINDS["AdamW"], net) for rank in range(P)]
    for each in crew:
        for p in each.named.values():
            each.optimizer.state[p] = {
                "step": torch.tensor(50.0),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.full_like(p, 1.0),  # far above the squares of these gradients
            }
    for rank, each in enumerate(crew):
        passed(each.net, rank, 0)
        each.optimizer.step()
    in_threads(P, lambda rank: crew[rank].levels[0].after_step())
    for each in crew:
        for name, p in each.named.items():
            share = scaled(each).squares[name].share(P)
            there = each.optimizer.state[p]["exp_avg_sq"] * share
            torch.testing.assert_close(there, torch.full_like(there, 0.9), rtol=0, atol=0.02)
    in_threads(P, lambda rank: crew[rank].levels[0].consolidate())
    for each in crew:
        for p in each.named.values():
            there = each.optimizer.state[p]["exp_avg_sq"]
            torch.testing.assert_close(there, torch.full_like(there, 0.9), rtol=0, atol=0.02)
        each.close()


def test_other_optimizers_and_a_replica_alone_are_left_as_they_are() -> None:
    for replicas, build in ((P, lambda ps: SGD(ps, lr=0.1)), (1, KINDS["AdamW"]), (P, capturable)):
        net = Loopback(replicas)
        crew = [member(rank, build, net) for rank in range(replicas)]
        for each in crew:
            assert not each.optimizer._optimizer_step_pre_hooks
            assert each.levels[0].moments is not None
            each.levels[0].moments.close()
            each.close()


def capturable(ps: list[Tensor]) -> Optimizer:
    return AdamW(ps, lr=0.01, capturable=True)


def test_a_step_that_a_scaler_leaves_out_changes_no_variance() -> None:
    """A fused optimizer is called all the same, and told so."""
    net = Loopback(P)
    crew = [member(rank, KINDS["fused"], net) for rank in range(P)]
    for step in range(3):
        for rank, each in enumerate(crew):
            each.optimizer.zero_grad()
            passed(each.net, rank, step)
            each.optimizer.step()
        in_threads(P, lambda rank: crew[rank].levels[0].after_step())
    for rank, each in enumerate(crew):
        before = {name: each.optimizer.state[p]["exp_avg_sq"].clone() for name, p in each.named.items()}
        passed(each.net, rank, 3)
        for p in each.named.values():
            assert p.grad is not None
            p.grad.fill_(math.inf)
        each.optimizer.found_inf, each.optimizer.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
        each.optimizer.step()
        for name, p in each.named.items():
            assert torch.equal(each.optimizer.state[p]["exp_avg_sq"], before[name])
        # And one that it does not: gradients are scaled, and the kernel divides them.
        each.optimizer.found_inf = torch.tensor(0.0)
        for p in each.named.values():
            p.grad = torch.full_like(p, 8 * 0.25)
        each.optimizer.step()
        for name, p in each.named.items():
            expected = 0.999 * before[name] + 0.001 * 0.25**2
            torch.testing.assert_close(each.optimizer.state[p]["exp_avg_sq"], expected, rtol=1e-6, atol=0)
    for each in crew:
        each.close()


def test_what_is_not_finite_is_no_sample() -> None:
    net = Loopback(P)
    crew = [member(rank, KINDS["AdamW"], net, "lowbit:bits=8,sync_every=8") for rank in range(P)]
    for step in range(3):
        for rank, each in enumerate(crew):
            each.optimizer.zero_grad()
            passed(each.net, rank, step)
            if step == 2 and rank == 1:
                next(iter(each.named.values())).grad.fill_(math.nan)  # type: ignore[union-attr]
            each.optimizer.step()
        before = scaled(crew[0]).saved_state()
        in_threads(P, lambda rank: crew[rank].levels[0].after_step())
    assert [scaled(each).saved_state() for each in crew] == [before] * P
    assert {each.step for each in scaled(crew[0]).squares.values()} == {1}
    for each in crew:
        each.close()


def test_a_replica_that_passes_over_a_step_does_not_count() -> None:
    """As with a scaler, where its gradients overflow."""
    net = Loopback(P)
    crew = [member(rank, KINDS["AdamW"], net, "lowbit:bits=8,sync_every=8") for rank in range(P)]
    known = Expected(0.9)
    gradients: list[dict[str, Tensor]] = []
    for rank, each in enumerate(crew):
        passed(each.net, rank, 0)
        if rank != 1:
            each.optimizer.step()
            gradients.append({name: p.grad for name, p in each.named.items() if p.grad is not None})
    in_threads(P, lambda rank: crew[rank].levels[0].after_step())
    known.see(0, gradients)
    for each in crew:
        for name, squares in scaled(each).squares.items():
            own, common = known.squares[name]
            assert math.isclose(squares.own, own * P / 2, rel_tol=1e-5)
            assert math.isclose(squares.common, common, rel_tol=1e-5)
        each.close()


@for_each("shape", [(3,), (700, 5), (40, 8, 3, 3)])
@for_each("last", [False, True])
def test_a_sample_is_of_equal_distances_in_memory(shape: tuple[int, ...], last: bool) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    found = sampled(x)
    n = x.numel()
    assert n <= found.numel() if n < scaled_variance.SAMPLED else 256 <= found.numel() < 512
    memory = x.permute(0, 2, 3, 1).reshape(-1) if last and len(shape) == 4 else x.reshape(-1)
    assert torch.equal(found, memory[:: max(1, n // 256)])


def test_the_share_goes_from_noise_to_one() -> None:
    assert Squares(0.0, 0.0).share(4) == 1.0
    assert Squares(2.0, 0.1).share(4) == 0.25
    assert Squares(2.0, 1.0).share(4) == 0.5
    assert Squares(2.0, 2.5).share(4) == 1.0
    squares = Squares()
    squares.move(4.0, 1.0, 3, 0.5)
    assert (squares.own, squares.common, squares.step) == (4 * (1 - 0.5**4), 1 - 0.5**4, 3)


@for_each("before", [2, 4, 8])
@for_each("replicas", [1, 2, 4, 16])
def test_shares_of_other_numbers_of_replicas_follow_from_the_noise(before: int, replicas: int) -> None:
    signal, noise = 3.0, 5.0
    common = of_others(signal + noise, signal + noise / before, before, replicas)
    assert math.isclose(common, signal + noise / replicas)


@for_each(
    "text, says",
    [
        ("lowbit:bound=0,variance=scaled", "leave one of them out"),
        ("lowbit:variance=mean", "variance"),
    ],
)
def test_what_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(tacit.ConfigError, match=says):
        tacit.parse(text)


def test_gradients_that_are_averaged_have_no_other_variance() -> None:
    with pytest.raises(tacit.ConfigError, match="variance='scaled' with subject='gradient'"):
        tacit.Strategy(variance="scaled")
