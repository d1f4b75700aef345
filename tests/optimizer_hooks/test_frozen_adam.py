"""What Adam makes of a momentum that is given while its variance is kept."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cases import for_each
from tacit.contracts import Momentum
from tacit.optimizer_hooks.frozen_adam import FrozenAdam, least_variance

LR = 0.01


def moved(beta2: float, gradients: list[Tensor], freeze_step: int, scale: float | None = None) -> Tensor:
    """How far each entry has moved in each step, in learning rates; gradients are sent as their momentum."""
    row = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = AdamW([row], lr=LR, betas=(0.9, beta2), weight_decay=0.0, fused=scale is not None)
    step, m, found = 0, torch.zeros_like(row), []
    taken = FrozenAdam(Momentum(0.9, freeze_step=freeze_step, refresh=2), [optimizer], {"row": row})
    taken.take(lambda: step)
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)  # type: ignore[attr-defined]
    for step, g in enumerate(gradients):
        m = 0.9 * m + 0.1 * g
        row.grad = m if taken.momentum.keeps_variance(step) else g.clone()
        row.grad = row.grad * (scale or 1.0)
        before = row.detach().clone()
        optimizer.step()
        found.append((row.detach() - before).abs() / LR)
    return torch.stack(found)


@for_each("beta2", (0.95, 0.999))
@for_each("scale", (None, 1024.0))
def test_a_row_whose_first_gradient_comes_late_stops_behind_it(beta2: float, scale: float | None) -> None:
    gradients = [torch.tensor([1.0, 0.0, 0.0, 0.0]) for _ in range(120)]
    gradients[20][1] = 1.0
    gradients[12][2] = 1e-4
    found = moved(beta2, gradients, 10, scale)
    most = 1 / math.sqrt(least_variance(0.9, beta2))  # of Adam's steps, in learning rates
    assert (found.amax(0)[1:3] < 1.1 * most).all()
    assert (found.sum(0)[1:3] < 1.5 * most / (1 - 0.9)).all()
    assert found.amax(0)[3] == 0
    assert abs(float(found[60, 0]) - 1) < 0.1


@for_each("betas", ((0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.5, 0.9)))
def test_adam_never_has_less_than_the_least_variance(betas: tuple[float, float]) -> None:
    (beta1, beta2), data = betas, torch.Generator().manual_seed(0)
    m, v = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for step in range(60):
        g = torch.randn(64, generator=data, dtype=torch.float64) * 10.0 ** (-(step % 7))
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
        assert (v >= least_variance(*betas) * m.square() * (1 - 1e-12)).all()
    worst = [(beta1 / beta2) ** k for k in range(200, -1, -1)]  # where the bound is met
    m = v = 0.0
    for g in worst:
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    assert v == pytest.approx(least_variance(*betas) * m * m, rel=1e-3)


def frozen(fused: bool = False) -> tuple[nn.Parameter, AdamW, FrozenAdam]:
    """After five steps by a gradient of ones, the last two of them with the variance kept."""
    row, losses = nn.Parameter(torch.zeros(4)), list[Tensor]()
    optimizer = AdamW([row], lr=LR, betas=(0.9, 0.95), fused=fused)
    taken = FrozenAdam(Momentum(0.9, freeze_step=3), [optimizer], {"row": row})
    taken.take(lambda: len(losses))
    for _ in range(5):
        optimizer.zero_grad()
        loss = row.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return row, optimizer, taken


def test_a_step_that_a_scaler_leaves_out_is_none_of_adams() -> None:
    (row, optimizer, _), (other, plain, _) = frozen(fused=True), frozen(fused=True)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for each in (optimizer, plain):
        each.step()
    assert torch.equal(row, other)
    assert torch.equal(optimizer.state[row]["exp_avg_sq"], plain.state[other]["exp_avg_sq"])


def test_a_step_that_raises_leaves_the_variance_as_it_was() -> None:
    (row, optimizer, taken), (other, plain, theirs) = frozen(), frozen()

    def interrupted(*_: object) -> None:
        raise RuntimeError("a hook of the user's")

    optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(RuntimeError, match="of the user's"):
        optimizer.step()
    taken.restore()
    theirs.restore()
    assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"] == (0.9, 0.95)
    assert torch.equal(optimizer.state[row]["exp_avg_sq"], plain.state[other]["exp_avg_sq"])
