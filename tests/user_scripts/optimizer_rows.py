"""Rows: optimizers, and what counts as a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR, ReduceLROnPlateau
from user_script import (
    GRADIENTS,
    NOT_ADAM,
    OURS,
    REPLICAS,
    STEPS,
    TABLE,
    TIMED,
    Script,
    same,
)

UNSEEN = {"so it would not see the step": OURS | TIMED}
"""What is said where an optimizer steps that attach was not given."""
CHANGED = {"call session.sync() right after that": REPLICAS}
"""What is said where replicas step alone, and something else writes parameters."""


class Climber(Optimizer):
    """Goes uphill a little, computes the gradient there, comes back and steps by it, as SAM does.

    `subtracts`: comes back but for rounding.
    """

    def __init__(self, params: Iterable[Tensor], subtracts: bool, **options: Any) -> None:
        super().__init__(params, options)
        self.subtracts = subtracts
        self.inner = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def up(self) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm() + 1e-12
        self.kept = [p.clone() for p in every]
        self.climbs = [p.grad * (0.02 / norm) for p in every]
        for p, climb in zip(every, self.climbs, strict=True):
            p.add_(climb)
        self.zero_grad()

    @torch.no_grad()
    def down(self) -> None:
        every = (p for group in self.param_groups for p in group["params"])
        for p, kept, climb in zip(every, self.kept, self.climbs, strict=True):
            p.copy_(p - climb if self.subtracts else kept)
        self.inner.step()
        self.zero_grad()


def climbed(script: Script, inside: bool, alone: bool = False, subtracts: bool = False) -> nn.Module:
    """`alone`: the first pass of a step is not exchanged."""
    model = script.wrapped()
    optimizer = Climber(model.parameters(), subtracts, lr=0.05, momentum=0.9)
    with script.attached(model, optimizer.inner if inside else optimizer):
        for step in range(STEPS):
            with model.no_sync() if alone else nullcontext():
                script.loss(model, step).backward()
            optimizer.up()
            script.loss(model, step).backward()
            optimizer.down()
            script.taken += 1
    return model


@TABLE.add(without=NOT_ADAM, says=UNSEEN)
def steps_of_an_optimizer_inside(script: Script) -> nn.Module:
    return climbed(script, inside=False)


@TABLE.add(without=NOT_ADAM, says={"compute the first inside `with model.no_sync():`": {"topk", "powersgd"}})
def optimizer_inside_that_attach_was_told_of(script: Script) -> nn.Module:
    return climbed(script, inside=True)


@TABLE.add(without=NOT_ADAM)
def optimizer_inside_whose_first_pass_is_not_exchanged(script: Script) -> nn.Module:
    return climbed(script, inside=True, alone=True)


@TABLE.add(without=NOT_ADAM, plain=False)
def optimizer_inside_that_comes_back_but_for_rounding(script: Script) -> nn.Module:
    """Each rank rounds otherwise: plain DDP leaves its replicas so, and a session makes them equal."""
    return climbed(script, inside=True, alone=True, subtracts=True)


class Lookahead(Optimizer):
    """Every third step goes back half way; as in timm it has never called `super().__init__`."""

    def __init__(self, inner: Optimizer) -> None:
        self._base_optimizer, self.param_groups = inner, inner.param_groups
        self.defaults, self.state = inner.defaults, inner.state
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self.every = [p for group in self.param_groups for p in group["params"]]
        self.slow, self.count = [p.detach().clone() for p in self.every], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._base_optimizer.step()
        self.count += 1
        for p, slow in zip(self.every, self.slow, strict=True) if self.count % 3 == 0 else ():
            p.copy_(slow.lerp_(p, 0.5))


def ahead(script: Script, inside: bool) -> nn.Module:
    model = script.wrapped()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    with script.attached(model, optimizer._base_optimizer if inside else optimizer):
        for step in range(STEPS):
            model.zero_grad()
            script.loss(model, step).backward()
            optimizer.step()
            script.taken += 1
    return model


@TABLE.add(without=NOT_ADAM, says=UNSEEN)
def lookahead(script: Script) -> nn.Module:
    return ahead(script, inside=False)


@TABLE.add(without=NOT_ADAM, says=CHANGED)
def lookahead_whose_inside_attach_was_told_of(script: Script) -> nn.Module:
    return ahead(script, inside=True)


def two(script: Script, model: nn.Module) -> tuple[Optimizer, Optimizer]:
    """One of the matrices, one of the biases."""
    every = [*model.parameters()]
    return script.optimizer([p for p in every if p.dim() > 1]), script.optimizer(
        [p for p in every if p.dim() == 1]
    )


def by_both(script: Script, told: slice, order: slice, seldom: int = 1) -> nn.Module:
    """Trains with two optimizers, of which attach is told `told`; the second steps every `seldom` steps."""
    model = script.wrapped()
    both = two(script, model)
    with script.attached(model, [*both[told]], counted=seldom == 1) as session:
        for step in range(STEPS):
            script.loss(model, step).backward()
            for optimizer in both[order]:
                if optimizer is both[0] or step % seldom == seldom - 1:
                    optimizer.step()
            model.zero_grad()
            script.taken += 1
        seen = session.metrics()["steps"] if script.strategy else STEPS
        assert seen in (STEPS - 1, STEPS), f"{seen} steps seen"  # of the last, the second has a part to come
    return model


@TABLE.add(says=UNSEEN)
def optimizer_that_attach_was_not_told_of(script: Script) -> nn.Module:
    return by_both(script, slice(0, 1), slice(None))


@TABLE.add()
def two_optimizers(script: Script) -> nn.Module:
    return by_both(script, slice(None), slice(None))


@TABLE.add()
def two_optimizers_in_the_other_order(script: Script) -> nn.Module:
    return by_both(script, slice(None), slice(None, None, -1))


@TABLE.add()
def the_last_optimizer_every_fifth_step(script: Script) -> nn.Module:
    return by_both(script, slice(None), slice(None), seldom=5)


@TABLE.add()
def the_first_optimizer_every_fifth_step(script: Script) -> nn.Module:
    return by_both(script, slice(None, None, -1), slice(None), seldom=5)


def in_two_stages(script: Script, anew: bool) -> nn.Module:
    model = script.wrapped()
    first, second = script.optimizer(model), script.optimizer(model)
    with script.attached(model, first):
        script.train(model, first, 0, 6)
        if not anew:
            script.train(model, second, 6, STEPS)
    if anew:
        with script.attached(model, second):
            script.train(model, second, 6, STEPS)
    return model


@TABLE.add(says=UNSEEN)
def another_optimizer_in_the_second_stage(script: Script) -> nn.Module:
    return in_two_stages(script, anew=False)


@TABLE.add()
def another_optimizer_that_is_attached_anew(script: Script) -> nn.Module:
    return in_two_stages(script, anew=True)


@TABLE.add(without=TIMED | NOT_ADAM)
def step_that_only_makes_the_state(script: Script) -> nn.Module:
    """As torch.distributed.checkpoint takes one, with a rate of 0 and gradients of zero."""

    def trained(makes: bool) -> nn.Module:
        one = Script(script.strategy)
        model = one.wrapped()
        optimizer = one.optimizer(model)  # of Adam torch itself would go on from step 1
        with one.attached(model, optimizer):
            if makes:
                get_optimizer_state_dict(model, optimizer)
            one.train(model, optimizer)
        script.before = one.before
        return model

    found = trained(True)
    same(found, trained(False), "the step that was none has left a trace")
    return found


class Relative(Optimizer):
    """Steps by a share of each parameter's size, as Adafactor does."""

    def __init__(self, params: Iterable[Tensor], **rate: Any) -> None:
        super().__init__(params, rate)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            size = 0.05 / self.taken**0.5 * max(1e-3, float(p.square().mean().sqrt()))
            p.sub_(p.grad / (p.grad.square().mean().sqrt() + 1e-12) * size)


def relative(script: Script, **rate: Any) -> nn.Module:
    model = script.wrapped()
    optimizer = Relative(model.parameters(), **rate)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model


@TABLE.add(without=NOT_ADAM)
def learning_rate_none(script: Script) -> nn.Module:
    return relative(script, lr=None)


@TABLE.add(without=NOT_ADAM)
def groups_without_a_learning_rate(script: Script) -> nn.Module:
    return relative(script, size=0.05)


@TABLE.add(without=NOT_ADAM | TIMED, says={"LBFGS": {"topk", "powersgd", "lowbit"}})
def lbfgs(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    with script.attached(model, optimizer):
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = script.loss(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
            script.taken += 1
    return model


@TABLE.add(without=NOT_ADAM, says={"ZeroRedundancyOptimizer": REPLICAS})
def optimizer_that_is_sharded_between_ranks(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model


def scheduled(script: Script, schedule: Any, **options: Any) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    made = schedule(optimizer, **options)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            made.step()
    return model


@TABLE.add(says={"betas": {"onebit-adam"}})
def one_cycle_of_rates_and_momenta(script: Script) -> nn.Module:
    return scheduled(script, OneCycleLR, max_lr=0.05, total_steps=STEPS + 1)


@TABLE.add()
def warm_restarts(script: Script) -> nn.Module:
    return scheduled(script, CosineAnnealingWarmRestarts, T_0=4)


@TABLE.add(plain=False, says={"learning rate": GRADIENTS | REPLICAS | {"auto"}}, without={"ddp"})
def rates_that_drift_apart(script: Script) -> nn.Module:
    """Each rank lowers its rate by its own loss."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            schedule.step(1.0 if script.rank == 0 else 1.0 / (step + 1))
    return model


@TABLE.add(without={*REPLICAS, *TIMED, "onebit-adam", "ddp"})
def steps_without_an_optimizer(script: Script) -> nn.Module:
    model = script.wrapped()
    with script.attached(model, None, counted=False):
        for step in range(STEPS):
            script.loss(model, step).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
    return model


@TABLE.add()
def hooks_of_the_optimizer_of_the_users_own(script: Script) -> nn.Module:
    """An average is kept behind each step, by a hook that was there before attach, and one behind it."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *given: seen.append(0))
    with script.attached(model, optimizer):
        optimizer.register_step_post_hook(lambda *given: seen.append(1))
        script.train(model, optimizer)
    assert sorted(seen) == [0] * STEPS + [1] * STEPS
    return model


@TABLE.add(says={"was frozen when the session began": GRADIENTS | REPLICAS | {"auto"}}, without={"ddp"})
def unfreezing(script: Script) -> nn.Module:
    net = script.net()
    net[0].requires_grad_(False)
    model = script.wrapped(net)
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 0, 5)
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": [*net[0].parameters()]})
        script.train(model, optimizer, 5, STEPS)
    return model


@TABLE.add()
def parameters_in_groups_of_their_own(script: Script) -> nn.Module:
    model = script.wrapped()
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]
    optimizer = script.optimizer(groups)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model


@TABLE.add()
def optimizer_made_before_ddp(script: Script) -> nn.Module:
    net = script.net()
    optimizer = script.optimizer(net)
    model = script.wrapped(net)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model
