"""AdaScale, where the parts of a batch are passes of one rank; where they are ranks: `gloo_checks`."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tacit.errors import AttachError, ConfigError
from tacit.optim import AdaScale


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Given(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.w * grad).sum()


def at_work(**options: Any) -> tuple[DistributedDataParallel, torch.optim.SGD, AdaScale]:
    model = DistributedDataParallel(Given())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, AdaScale(model, optimizer, **options)


def step(model: Any, optimizer: Any, parts: list[Tensor]) -> Tensor:
    """One step by the mean of these gradients; how far it went."""
    before = model.module.w.detach().clone()
    optimizer.zero_grad()
    for i, part in enumerate(parts):
        if i < len(parts) - 1:
            with model.no_sync():
                (model(part) / len(parts)).backward()
        else:
            (model(part) / len(parts)).backward()
    optimizer.step()
    moved: Tensor = before - model.module.w.detach()
    return moved


EAST, NORTH = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 1, 0, 0])


@pytest.mark.usefixtures("alone")
def test_equal_parts_gain_nothing_and_parts_that_cancel_all() -> None:
    model, optimizer, scaled = at_work()
    torch.testing.assert_close(step(model, optimizer, [EAST] * 4), 0.1 * EAST)
    assert (scaled.gain, scaled.progress, scaled.noise_scale) == (1.0, 1.0, 0.0)
    model, optimizer, scaled = at_work()
    step(model, optimizer, [EAST, -EAST, NORTH, -NORTH])
    assert scaled.gain == pytest.approx(4)
    assert scaled.noise_scale == math.inf


@pytest.mark.usefixtures("alone")
def test_the_gain_is_the_papers_formula_of_averages() -> None:
    model, optimizer, scaled = at_work(smoothing=0.5)
    given = torch.Generator().manual_seed(0)
    means, weight, progress = [0.0, 0.0], 0.0, 0.0
    for _ in range(5):
        parts = list(torch.randn(3, 4, generator=given) + 0.5)
        mean = torch.stack(parts).mean(0)
        moved = step(model, optimizer, parts)
        each, whole = sum(float(g @ g) for g in parts), float(mean @ mean)
        sigma = max(0.0, each / 2 - 3 / 2 * whole)
        means = [0.5 * a + 0.5 * b for a, b in zip(means, (sigma, max(0.0, whole - sigma / 3)), strict=True)]
        weight = 0.5 * weight + 0.5
        a, b = (value / weight for value in means)
        gain = (a + b) / (a / 3 + b)
        progress += gain
        assert scaled.gain == pytest.approx(gain, rel=1e-5)
        torch.testing.assert_close(moved, 0.1 * gain * mean)
        assert optimizer.param_groups[0]["lr"] == 0.1, "the rate is the user's again"
    assert scaled.progress == pytest.approx(progress, rel=1e-5)
    assert 1 < scaled.gain < 3
    assert scaled.noise_scale == pytest.approx(means[0] / means[1], rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_a_gradient_that_is_not_finite_says_nothing_and_one_part_has_no_gain() -> None:
    model, optimizer, scaled = at_work()
    step(model, optimizer, [EAST, -EAST + NORTH])
    before = scaled.gain
    step(model, optimizer, [math.inf * EAST, NORTH])
    assert scaled.gain == before
    step(model, optimizer, [0 * EAST, 0 * EAST])
    assert math.isfinite(scaled.gain)
    model, optimizer, scaled = at_work()
    step(model, optimizer, [EAST])
    assert scaled.gain == 1.0


@pytest.mark.usefixtures("alone")
def test_a_training_goes_on_and_closing_leaves_nothing() -> None:
    model, optimizer, scaled = at_work()
    parts = [EAST, NORTH, EAST + NORTH]
    step(model, optimizer, parts)
    again, by, resumed = at_work()
    resumed.load_state_dict(scaled.state_dict())
    torch.testing.assert_close(step(again, by, parts), step(model, optimizer, parts))
    assert resumed.state_dict() == scaled.state_dict()
    resumed.close()
    resumed.close()
    torch.testing.assert_close(step(again, by, parts), 0.1 * torch.stack(parts).mean(0))
    with pytest.raises(ConfigError, match="no state of AdaScale's"):
        resumed.load_state_dict({"progress": 1.0})


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_is_refused() -> None:
    model = DistributedDataParallel(Given())
    with pytest.raises(AttachError, match="model is a Given: wrap it in DistributedDataParallel"):
        AdaScale(model.module, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=r"optimizer is AdamW.*scale_lr"):
        AdaScale(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="smoothing=1"):
        AdaScale(model, torch.optim.SGD(model.parameters()), smoothing=1.0)
