"""Local SGD against a loop that is written out: periods, groups, schedules, and what stands beside."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from rank_training import Checks, close_to, flat, network, raises, same_on_all_ranks, sgd, wrapped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam, Optimizer
from training_loop_checks import Loop, scaler

import tacit

CHECKS = Checks()
check = CHECKS.add

EPS = 1e-3
"""Larger than usual: entries whose gradients are all rounding would otherwise step by its sign."""

Build = Callable[[nn.Module], Optimizer]


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))


class Odd(nn.Module):
    """A frozen layer, and one matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)
        self.frozen, self.out = nn.Linear(20, 20), nn.Linear(20, 5)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.frozen(self.b(self.a(x).relu())))
        return y


def momentum(model: nn.Module) -> Optimizer:
    return sgd(model, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01, eps=EPS)


def lars(model: nn.Module) -> Optimizer:
    return tacit.LARS(model.parameters(), lr=2.0)


def lamb(model: nn.Module) -> Optimizer:
    return tacit.LAMB(model.parameters(), lr=0.01, eps=EPS)


def grouped(model: nn.Module) -> Optimizer:
    first, *others = (p for p in model.parameters() if p.requires_grad)
    groups = [{"params": [first], "lr": 0.01, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def train(
    model: nn.Module, optimizer: Optimizer, first: int, count: int, micro: int, after: Callable[[int], None]
) -> None:
    """Steps on data of this rank's own; all backward passes of a step but the last are unsynced."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8) if first == 0 else None
    for step in range(first, first + count):
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        for i in range(micro):
            x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)
            unsynced = isinstance(model, DDP) and i < micro - 1
            with model.no_sync() if unsynced else nullcontext():
                nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after(step)
        if schedule is not None:
            schedule.step()


@torch.no_grad()
def mean_(tensors: list[Tensor]) -> None:
    for each in tensors:
        each.div_(dist.get_world_size())
        dist.all_reduce(each)


def held(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's state, in the order of its parameters, without counters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    return [each for p in parameters for each in optimizer.state[p].values() if each.shape == p.shape]


def everything(model: nn.Module, optimizer: Optimizer) -> Tensor:
    floats = [b for b in model.buffers() if b.is_floating_point()]
    return torch.cat([each.detach().reshape(-1) for each in (*model.parameters(), *floats, *held(optimizer))])


def by_hand(
    module: nn.Module, build: Build, period: int, count: int, micro: int, beside: str, buffers: str
) -> Tensor:
    """Local SGD without tacit and without DDP, and what a closing session makes equal."""
    optimizer = build(module)
    floats = [b for b in module.buffers() if b.is_floating_point()]
    trained = [p for p in module.parameters() if p.requires_grad]

    def meet() -> None:
        mean_([*trained, *(floats if buffers == "averaged" else [])])
        if beside == "averaged":
            mean_(held(optimizer))
        if beside == "reset":
            optimizer.state.clear()

    def after(step: int) -> None:
        if (step + 1) % period == 0:
            meet()

    train(module, optimizer, 0, count, micro, after)
    if count % period:
        meet()
    if beside == "local":
        mean_(held(optimizer))
    if buffers == "local":
        mean_(floats)
    return everything(module, optimizer)


def compare(
    module: nn.Module,
    build: Build,
    count: int = 7,
    micro: int = 1,
    beside: str = "local",
    buffers: str = "averaged",
) -> None:
    expected = by_hand(copy.deepcopy(module), build, 3, count, micro, beside, buffers)
    model = DDP(module, gradient_as_bucket_view=True)
    optimizer = build(model)
    strategy = f"localsgd:sync_every=3,momentum={beside},buffers={buffers}"
    with tacit.attach(model, optimizer, strategy) as session:
        assert not model.broadcast_buffers
        train(model, optimizer, 0, count, micro, lambda step: None)
        assert session.metrics()["steps"] == count
        assert session.metrics()["rounds"] == count // 3
    assert model.broadcast_buffers
    found = everything(model, optimizer)
    if beside == "reset" and expected.numel() != found.numel():
        zeros = torch.cat([each.reshape(-1) for each in held(optimizer)])
        assert not zeros.any()
        expected = torch.cat([expected, zeros])
    assert same_on_all_ranks(found)
    close_to(found, expected, 1e-5)


@check
def a_period_counts_steps_however_many_passes_each_takes() -> None:
    compare(network(), momentum, micro=3)


@check
def frozen_and_shared_parameters_in_groups_with_a_schedule() -> None:
    compare(Odd(), grouped)


@check
def momentum_is_local_averaged_or_reset() -> None:
    for beside in ("local", "averaged", "reset"):
        for build in (momentum, adam):
            compare(network(), build, beside=beside)
    compare(network(), adam, count=6, beside="reset")


@check
def optimizers_for_large_batches_work_as_others_do() -> None:
    for build in (lars, lamb):
        compare(network(), build)
        compare(network(), build, beside="averaged")
        found = []
        for algorithm in ("ddp", "dense", "topk:ratio=1.0"):
            model = wrapped()
            optimizer = build(model)
            with tacit.attach(model, optimizer, algorithm):
                train(model, optimizer, 0, 5, 1, lambda step: None)
            found.append(everything(model, optimizer))
        assert same_on_all_ranks(found[0])
        for each in found[1:]:
            close_to(each, found[0], 1e-5)


@check
def buffers_are_averaged_or_local() -> None:
    for buffers in ("averaged", "local"):
        compare(normed(), momentum, buffers=buffers)
    compare(normed(), momentum, beside="averaged", buffers="local", count=6)


@check
def what_is_local_differs_between_rounds_and_what_is_averaged_is_equal_to_the_bit() -> None:
    for beside, buffers in (("averaged", "local"), ("local", "averaged")):
        model = wrapped(normed())
        optimizer = adam(model)
        text = f"localsgd:sync_every=2,momentum={beside},buffers={buffers}"
        with tacit.attach(model, optimizer, text) as session:
            train(model, optimizer, 0, 4, 1, lambda step: None)
            moments = torch.cat([each.reshape(-1) for each in held(optimizer)])
            assert same_on_all_ranks(moments) == (beside == "averaged")
            assert same_on_all_ranks(model.module[1].running_mean) == (buffers == "averaged")
            sent = session.metrics()["bytes_out"]
            dense = sum(bucket.numel for bucket in session.session.buckets) + (
                moments.numel() if moments.any() else 0
            )
            if beside == "averaged":
                # Two rounds of fp32 by a ring of four; with each, and at first, a checksum to three peers.
                assert sent == 2 * (4 * dense * 2 * 3 / 4 + 8 * 3) + 8 * 3
            train(model, optimizer, 4, 1, 1, lambda step: None)
        assert same_on_all_ranks(everything(model, optimizer))


@check
def between_nodes_momentum_is_averaged_too() -> None:
    model = wrapped(normed())
    optimizer = momentum(model)
    with tacit.attach(model, optimizer, "ednncomm:sync_every=2,momentum=averaged,buffers=local"):
        train(model, optimizer, 0, 4, 1, lambda step: None)
        assert same_on_all_ranks(torch.cat([each.reshape(-1) for each in held(optimizer)]))
        assert not same_on_all_ranks(model.module[1].running_mean)
    assert same_on_all_ranks(everything(model, optimizer))


@check
def late_answers_in_fragments_average_momentum_when_they_land() -> None:
    model = wrapped()
    optimizer = momentum(model)
    strategy = tacit.Strategy(
        subject="delta",
        rounds=tacit.Every(4, fragments=2),
        overlap=tacit.Delayed(1),
        merge=tacit.Average(),
        momentum="averaged",
    )
    with tacit.attach(model, optimizer, strategy):
        train(model, optimizer, 0, 11, 1, lambda step: None)
    assert same_on_all_ranks(everything(model, optimizer))


@check
def where_a_rank_has_no_momentum_yet_all_keep_their_own() -> None:
    loop = Loop(scaler(), overflows={0: (1,)}, model=wrapped())
    text = "localsgd:sync_every=1,momentum=averaged"
    with tacit.attach(loop.model, loop.optimizer, text, scaler=loop.scaler):
        loop.steps(1)  # nobody steps, and the round is held
        assert not held(loop.optimizer)
        loop.steps(2)
        assert same_on_all_ranks(everything(loop.model, loop.optimizer))
    loop = Loop(scaler(), overflows={0: (1,), 1: (1,)}, model=wrapped())
    text = "localsgd:sync_every=2,momentum=averaged"
    with tacit.attach(loop.model, loop.optimizer, text, scaler=loop.scaler):
        loop.steps(2)
        assert bool(held(loop.optimizer)) == (dist.get_rank() != 1)
        loop.steps(2)
        assert same_on_all_ranks(everything(loop.model, loop.optimizer))


@check
def moments_have_periods_of_their_own_with_a_scaler_too() -> None:
    """They are averaged though no round is due, in a step that a rank's overflow has all pass over, too."""
    for overflows in ({}, {2: (1,)}):
        loop = Loop(scaler(), overflows=overflows, model=wrapped())
        text = "desloc:sync_every=8,first_every=3,second_every=3"
        with tacit.attach(loop.model, loop.optimizer, text, scaler=loop.scaler) as session:
            for equal in (False, False, True, False):
                loop.steps(1)
                moments = torch.cat([each.reshape(-1) for each in held(loop.optimizer)])
                assert same_on_all_ranks(moments) is equal
            assert session.metrics()["rounds"] == 0
            assert not same_on_all_ranks(flat(loop.model))


@check
def an_optimizer_that_cannot_start_from_zero_is_refused() -> None:
    model = wrapped()
    rprop = torch.optim.Rprop(model.parameters())
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, rprop, "localsgd:momentum=reset"),
        "that of Rprop does not begin with zeros",
    )


if __name__ == "__main__":
    CHECKS.run()
