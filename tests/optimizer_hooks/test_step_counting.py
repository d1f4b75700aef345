"""Which steps of which optimizers are a step of the session."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from cases import for_each
from tacit.errors import AttachError
from tacit.optimizer_hooks.step_counting import StepCounting


class Bed:
    """A model, its optimizers, and how many steps were counted."""

    def __init__(self, optimizers: int = 2, given: int | None = None) -> None:
        self.model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(optimizers)))
        self.optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in self.model]
        self.backwards = SimpleNamespace(begun=0, stepped=lambda: None)
        self.steps = self.begun = 0
        self.seen = StepCounting(
            self.optimizers[:given],
            dict(self.model.named_parameters()),
            self.backwards,  # type: ignore[arg-type]
            "localsgd",
            self._begin,
            self._count,
        )

    def _begin(self) -> None:
        self.begun += 1

    def _count(self) -> None:
        self.steps += 1

    def backward(self) -> None:
        self.backwards.begun += 1
        self.model(torch.ones(1, 2)).sum().backward()


@for_each("order", [(0, 1), (1, 0)])
def test_a_step_counts_when_all_have_stepped_in_any_order(order: tuple[int, ...]) -> None:
    bed = Bed()
    for step in range(5):
        bed.backward()
        for i in order:
            assert bed.steps == step
            bed.optimizers[i].step()
        assert bed.steps == bed.begun == step + 1
    bed.seen.complete()
    assert bed.steps == 5
    bed.seen.remove()


@for_each("seldom", [0, 1])
def test_one_of_them_may_step_less_often(seldom: int) -> None:
    bed = Bed()
    for step in range(10):
        bed.backward()
        assert not bed.seen.is_half_taken
        bed.optimizers[1 - seldom].step()
        assert bed.seen.is_half_taken
        if step % 5 == 4:
            bed.optimizers[seldom].step()
    bed.seen.complete()
    assert bed.steps == 10
    bed.seen.remove()


def test_a_step_that_only_makes_state_is_none() -> None:
    bed = Bed(1)
    get_optimizer_state_dict(bed.model, bed.optimizers[0])  # steps by a rate of 0
    bed.optimizers[0].step()  # no gradients
    assert bed.steps == bed.begun == 0
    bed.backward()
    bed.optimizers[0].param_groups[0]["lr"] = 0.0
    bed.optimizers[0].step()
    assert bed.steps == 1, "a rate of 0 in training is a step"
    bed.seen.remove()


def test_an_optimizer_that_was_not_given_is_refused_as_it_steps() -> None:
    bed = Bed(2, given=1)
    bed.backward()
    bed.optimizers[0].step()
    before = bed.model[1].weight.detach().clone()
    with pytest.raises(AttachError, match=r"AdamW steps 1.weight, .* was attached with AdamW"):
        bed.optimizers[1].step()
    assert torch.equal(before, bed.model[1].weight)
    strangers = nn.Linear(2, 2)
    torch.optim.SGD(strangers.parameters(), lr=0.1).step()
    bed.seen.remove()
    bed.optimizers[1].step()


class Around(torch.optim.Optimizer):
    """Its step is that of an optimizer inside."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, closure: Any = None) -> None:
        self.inside.step()


def test_of_two_optimizers_one_around_the_other_either_may_be_given() -> None:
    layer = nn.Linear(2, 2)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    outer = Around(inner)
    for given in (inner, outer):
        counted: list[int] = []
        count = partial(counted.append, 1)
        seen = StepCounting([given], dict(layer.named_parameters()), None, "localsgd", lambda: None, count)
        layer(torch.ones(1, 2)).sum().backward()
        outer.step()
        assert counted == [1]
        if given is outer:
            with pytest.raises(AttachError, match="SGD steps weight"):
                inner.step()
        seen.remove()


def test_gradients_that_stayed_here_are_refused() -> None:
    bed = Bed(1)
    (optimizer,) = bed.optimizers
    bed.backward()
    bed.seen.refuse_own_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    bed.seen.refuse_own_gradients(optimizer)  # there is none
    bed.model(torch.ones(1, 2)).sum().backward()  # DDP was passed by
    with pytest.raises(AttachError, match=r"not model\.module"):
        bed.seen.refuse_own_gradients(optimizer)
    bed.seen.remove()
