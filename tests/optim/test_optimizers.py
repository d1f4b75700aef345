"""LARS and LAMB against their papers' formulas, in double precision."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from tacit import LAMB, LARS
from tacit.errors import ConfigError
from tacit.kernels.dispatch import emulated_device

BOTH = [LARS, LAMB]


def lars(w: Tensor, gradients: list[Tensor], rates: list[float], layered: bool) -> Tensor:
    """You et al. 2017, algorithm 1."""
    v, decay = torch.zeros_like(w), 0.01 if layered else 0.0
    for g, lr in zip(gradients, rates, strict=True):
        local = 0.02 * w.norm() / (g.norm() + decay * w.norm()) if layered else 1.0
        v = 0.8 * v + lr * local * (g + decay * w)
        w = w - v
    return w


def lamb(w: Tensor, gradients: list[Tensor], rates: list[float], layered: bool) -> Tensor:
    """You et al. 2020, algorithm 2; the authors' code leaves biases and norms out of decay and adaptation."""
    m, v, decay = torch.zeros_like(w), torch.zeros_like(w), 0.1 if layered else 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = 0.8 * m + 0.2 * g
        v = 0.99 * v + 0.01 * g.square()
        r = (m / (1 - 0.8**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3) + decay * w
        w = w - lr * (w.norm() / r.norm() if layered else 1.0) * r
    return w


MADE: dict[Callable[..., Tensor], Callable[[list[nn.Parameter]], Optimizer]] = {
    lars: lambda p: LARS(p, lr=0.5, momentum=0.8, weight_decay=0.01, trust=0.02),
    lamb: lambda p: LAMB(p, lr=0.5, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("formula", MADE)
def test_the_steps_are_those_of_the_paper(formula: Callable[..., Tensor]) -> None:
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((6, 4), (3, 2, 2), (5,))]
    gradients = [[torch.randn(w.shape, generator=draw, dtype=torch.float64) for _ in range(6)] for w in start]
    parameters = [nn.Parameter(w.clone()) for w in start]
    optimizer = MADE[formula](parameters)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    for step in range(6):
        for p, each in zip(parameters, gradients, strict=True):
            p.grad = each[step].clone()
        optimizer.step()
        schedule.step()
        for p, each in zip(parameters, gradients, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, each[step]), "a step must leave the gradient alone"
    rates = [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    for p, w, each in zip(parameters, start, gradients, strict=True):
        torch.testing.assert_close(p.data, formula(w, each, rates, layered=w.ndim > 1))


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_and_gradients_of_zeros_stay_finite(kind: type[Optimizer]) -> None:
    zero, other = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
    unused = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([zero, other, unused], lr=0.1, weight_decay=0.0)  # type: ignore[call-arg]
    zero.grad, other.grad = torch.ones(3, 2), torch.zeros(3, 2)
    optimizer.step()
    assert bool(zero.isfinite().all())
    assert bool(zero.all())
    assert torch.equal(other, torch.ones(3, 2))
    assert unused not in optimizer.state


@pytest.mark.parametrize("kind", BOTH)
def test_a_saved_state_goes_on_bit_for_bit(kind: type[Optimizer]) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
        for i in range(count):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(i))).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    steps(model, optimizer, 3)
    again = copy.deepcopy(model)
    other = kind(again.parameters(), lr=0.5)  # type: ignore[call-arg]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 3)
    steps(again, other, 3)
    assert torch.equal(model.weight, again.weight)


@pytest.mark.parametrize("kind", BOTH)
def test_a_copy_steps_as_the_original(kind: type[Optimizer]) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2)
    optimizer = kind([p], lr=0.1)  # type: ignore[call-arg]
    optimizer.step()
    again = copy.deepcopy(optimizer)
    other = again.param_groups[0]["params"][0]
    other.grad = torch.ones(3, 2)
    optimizer.step()
    again.step()
    assert torch.equal(p, other)


def test_a_closure_gives_the_loss() -> None:
    p = nn.Parameter(torch.ones(2, 2))

    def loss() -> float:
        value = p.square().sum()
        value.backward()
        return float(value.detach())

    for optimizer in (LARS([p], lr=0.1), LAMB([p])):
        p.data.fill_(1.0)
        assert optimizer.step(loss) == 4.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: LARS(p, lr=-1.0), "lr=-1.0 is not possible"),
        (lambda p: LARS(p, lr=0.1, momentum=1.0), r"momentum=1.0 is not in \[0, 1\)"),
        (lambda p: LARS(p, lr=0.1, trust=0.0), "trust=0.0 is not possible: write a number above 0"),
        (lambda p: LAMB(p, betas=(0.9, 1.5)), r"betas\[1\]=1.5 is not in \[0, 1\)"),
        (lambda p: LAMB(p, eps=0.0), "eps=0.0 is not possible"),
        (lambda p: LAMB(p, weight_decay=float("nan")), "weight_decay=nan is not possible"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[list[nn.Parameter]], Optimizer], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make([nn.Parameter(torch.ones(2, 2))])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_a_device_a_step_is_the_same_but_for_rounding(kind: type[Optimizer], dtype: torch.dtype) -> None:
    def trained() -> list[Tensor]:
        draw = torch.Generator().manual_seed(1)
        shapes = ((6, 4), (3, 2, 2), (5,), (2, 2))
        parameters = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]
        nn.init.zeros_(parameters[-1])
        optimizer = kind(parameters, lr=0.1)  # type: ignore[call-arg]
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=draw).to(dtype)
            optimizer.step()
        return [p.data for p in parameters]

    there = trained()
    with emulated_device():
        here = trained()
    near = {"rtol": 2**-6, "atol": 1e-2} if dtype == torch.bfloat16 else {}  # type: ignore[var-annotated]
    for p, other in zip(here, there, strict=True):
        torch.testing.assert_close(p, other, **near)


@pytest.mark.parametrize("kind", BOTH)
def test_on_a_device_no_value_is_read(kind: type[Optimizer]) -> None:
    p = nn.Parameter(torch.empty(6, 4, device="meta"))  # has none
    optimizer = kind([p], lr=0.1)  # type: ignore[call-arg]
    for _ in range(2):
        p.grad = torch.empty_like(p)
        optimizer.step()
