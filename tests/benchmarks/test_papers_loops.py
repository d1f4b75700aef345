"""The GAN's two networks learn from their own losses only; other optimizers train what digits trains."""

import pytest
import torch
from torch import Tensor

from loops import CLASSES, OPTIMIZERS, Pair, _judged, _task, gan, recognised
from tacit_lab.recipes.digits import Digits


def batch() -> tuple[Tensor, Tensor]:
    x, y = next(iter(Digits().train_batches(0, 0, 4, seed=0)))
    return x, y


def gradients(module: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_each_network_has_the_gradient_of_its_own_loss() -> None:
    x, y = batch()
    task = gan(seed=0)
    pair = task.model
    assert isinstance(pair, Pair)
    torch.manual_seed(1)
    pair(x, y).backward()
    both = gradients(pair.discriminator), gradients(pair.generator)

    pair.zero_grad()
    torch.manual_seed(1)
    made = pair.make(y)
    learns = _judged(pair.discriminator(x.flatten(1)), y, 1.0)
    (learns + _judged(pair.discriminator(made.detach()), y, 0.0)).backward()
    torch.testing.assert_close(gradients(pair.discriminator), both[0])

    pair.zero_grad()
    _judged(pair.discriminator(made), y, 1.0).backward()
    torch.testing.assert_close(gradients(pair.generator), both[1])


def test_each_network_has_an_optimizer() -> None:
    task = gan(seed=0)
    held = [{id(p) for group in each.param_groups for p in group["params"]} for each in task.optimizers]
    assert len(held) == 2
    assert not held[0] & held[1]
    assert held[0] | held[1] == {id(p) for p in task.model.parameters()}


def test_a_generator_that_copies_is_recognised_and_noise_is_not() -> None:
    class Copies(Pair):
        def make(self, y: Tensor) -> Tensor:
            x, classes = (torch.cat(each) for each in zip(*Digits().train_batches(0, 0, 1, 0), strict=True))
            return torch.stack([x[classes == int(each)][0].flatten() for each in y])

    assert recognised(Copies()) == 1.0
    assert recognised(Pair()) < 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_the_same_network(name: str) -> None:
    x, y = batch()
    task = _task(f"optimizer:{name}", Digits(), 0)
    before = float(task.loss(task.model, x, y).detach())
    for _ in range(5):
        task.optimizers[0].zero_grad()
        task.loss(task.model, x, y).backward()
        task.optimizers[0].step()
    assert float(task.loss(task.model, x, y).detach()) < before
    assert 0.0 <= task.accuracy(task.model) <= 1.0
    assert task.model(x).shape == (len(y), CLASSES)
