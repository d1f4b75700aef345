"""Checks of late gradients on real Gloo processes: every function runs on all ranks of one launch."""

import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_checks import poisoned, resumed
from rank_training import (
    Checks,
    close_to,
    flat,
    network,
    raises,
    same_on_all_ranks,
    sgd,
    steps,
    trained,
    wrapped,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.contracts import Compressor, Context, Exchange, State
from tacit.overlap import Delayed

CHECKS = Checks()
check = CHECKS.add


def late(compressor: Compressor, warmup_steps: int = 0) -> tacit.Strategy:
    return tacit.Strategy(overlap=Delayed(1, warmup_steps), compressor=compressor)


COMPRESSORS: dict[str, Compressor] = {
    "dense": tacit.Dense(),
    "bf16": tacit.BF16(),
    "topk": tacit.ErrorFeedback(tacit.TopK(ratio=0.1)),
    "sign": tacit.ErrorFeedback(tacit.Sign()),
    "powersgd": tacit.ErrorFeedback(tacit.PowerSGD(rank=2)),
    "qsgd": tacit.QSGD(),
    "lag": tacit.LAG(),
}


def delayed_sgd(
    count: int, warmup_steps: int = 0, momentum: float = 0.9, micro: int = 1, max_norm: float | None = None
) -> Tensor:
    """The parameters after `count` steps of the formula alone; on the data of `replicas.steps`."""
    model = network()
    optimizer = sgd(model, momentum)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    before: list[Tensor] = []
    for step in range(count):
        optimizer.zero_grad()
        for _ in range(micro):
            x = torch.randn(8, 20, generator=generator)
            y = torch.randint(0, 5, (8,), generator=generator)
            nn.functional.cross_entropy(model(x), y).backward()
        means = []
        for p in parameters:
            assert p.grad is not None
            means.append(p.grad.clone())
            dist.all_reduce(means[-1])
            means[-1] /= dist.get_world_size()
        applied = means if step < max(1, warmup_steps) else before
        for p, g in zip(parameters, applied, strict=True):
            p.grad = g.clone()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        before = means
    return flat(model)


@check
def its_way_is_that_of_delayed_sgd() -> None:
    for warmup_steps, momentum in ((0, 0.0), (0, 0.9), (1, 0.9), (5, 0.9)):
        here = trained(f"pipesgd:warmup_steps={warmup_steps}", 10, momentum)
        close_to(here, delayed_sgd(10, warmup_steps, momentum))
    assert float((trained("pipesgd") - trained("ddp")).abs().max()) > 1e-3


@check
def a_warm_up_that_never_ends_is_ddp() -> None:
    close_to(trained("pipesgd:warmup_steps=100"), trained("ddp"))


@check
def gradients_accumulate_without_sync() -> None:
    close_to(trained("pipesgd", 8, micro=3), delayed_sgd(8, micro=3))


def clipped(model: DDP, optimizer: torch.optim.Optimizer, max_norm: float) -> list[float]:
    """Have gradients clipped before every step; the norms that they had."""
    norms: list[float] = []

    def clip(*_: object) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))

    optimizer.register_step_pre_hook(clip)
    return norms


@check
def what_is_clipped_is_the_late_mean() -> None:
    model = wrapped()
    optimizer = sgd(model)
    norms = clipped(model, optimizer, 0.2)
    with tacit.attach(model, optimizer, "pipesgd"):
        steps(model, optimizer, 8)
    assert max(norms) > 0.2
    close_to(flat(model), delayed_sgd(8, max_norm=0.2))


def gradients(strategy: tacit.Strategy, count: int) -> list[Tensor]:
    """What backward has left in each step of a model that stays where it is."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    left: list[Tensor] = []

    def note(*_: object) -> None:
        left.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))

    optimizer.register_step_pre_hook(note)
    with tacit.attach(model, optimizer, strategy):
        steps(model, optimizer, count)
    return left


@check
def late_means_are_the_punctual_ones_a_step_later_to_the_bit() -> None:
    strategies = {name: tacit.Strategy(compressor=compressor) for name, compressor in COMPRESSORS.items()}
    topk, sign = COMPRESSORS["topk"], COMPRESSORS["sign"]
    strategies["topk by node"] = tacit.Strategy(compressor=topk, topology=tacit.Hierarchical())
    strategies["sign in two phases"] = tacit.Strategy(compressor=sign, topology=tacit.TwoPhase())
    for name, strategy in strategies.items():
        punctual = gradients(strategy, 6)
        tardy = gradients(replace(strategy, overlap=Delayed(1, warmup_steps=2)), 6)
        for step, mean in enumerate(tardy):
            assert torch.equal(mean, punctual[step if step < 2 else step - 1]), f"{name}, step {step}"


@dataclass(frozen=True)
class Gated(Compressor):
    """Dense, but the exchange of any step but the first waits until backward has ended."""

    inline = False
    hides_nonfinite = False

    def exempts(self, shape: torch.Size) -> bool:
        return False

    def init(self, like: Tensor) -> State:
        return {}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        if ctx.step and not x.is_meta:
            assert ENDED[ctx.step].wait(25), "backward waits for the exchange of its own step"
        return (yield from tacit.Dense().exchange(x, state, ctx))


GATED_STEPS = 6
ENDED = [threading.Event() for _ in range(GATED_STEPS)]
"""Set when the backward of that step has ended; made beforehand, as two threads ask for them."""


@check
def training_goes_on_while_a_round_is_under_way() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, late(Gated())) as session:
        for step in range(GATED_STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().sum().backward()
            optimizer.step()
            assert session.session.round == max(1, step), "the round of this step cannot have landed"
            ENDED[step].set()
        session.flush()
        assert session.metrics()["rounds"] == session.metrics()["steps"] == GATED_STEPS
    assert same_on_all_ranks(flat(model))


@check
def a_run_that_is_resumed_is_the_run_that_never_stopped() -> None:
    folder = Path(sys.argv[1])
    stops = (1, 0), (3, 4), (5, 0)
    each = [("dense", *stop) for stop in stops]
    each += [(name, *stop) for name, stop in zip(("topk", "powersgd", "lag"), stops, strict=True)]
    for name, before, warmup_steps in each:
        strategy = late(COMPRESSORS[name], warmup_steps)
        never, stopped = resumed(strategy, before, 4, folder)
        assert torch.equal(never, stopped), f"{strategy}, saved after {before} steps"
    never, stopped = resumed("pipesgd:compressor=int8", 4, 4, folder)
    assert torch.equal(never, stopped)


@check
def a_checkpoint_holds_the_mean_that_is_under_way() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "pipesgd") as session:
        steps(model, optimizer, 4)
        saved = session.state_dict()
        means = {key: value for key, value in saved.items() if key.endswith("/delayed_mean")}
        names = [name for name, _ in model.module.named_parameters()]
        assert sorted(means) == sorted(f"shared/0/{name}/delayed_mean" for name in names)
        assert all(same_on_all_ranks(mean) for mean in means.values())
        assert all(float(mean.abs().sum()) > 0 for mean in means.values())
        steps(model, optimizer, 1, seed=9)
        for name, p in model.module.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad.view(-1), means[f"shared/0/{name}/delayed_mean"]), name


@check
def closing_drops_the_last_mean_and_sync_changes_nothing() -> None:
    model, plain = wrapped(), wrapped()
    optimizer, other = sgd(model, momentum=0.0), sgd(plain, momentum=0.0)
    with tacit.attach(model, optimizer, "pipesgd") as session:
        steps(model, optimizer, 5)
        before = flat(model)
        session.sync()
        assert torch.equal(flat(model), before)
    assert torch.equal(flat(model), before)
    assert same_on_all_ranks(before)
    plain.load_state_dict(model.state_dict())
    with tacit.attach(model, optimizer, "pipesgd"):
        steps(model, optimizer, 1, seed=3)  # the first step of another session is synchronous
    steps(plain, other, 1, seed=3)
    for each, its in ((model, optimizer), (plain, other)):
        steps(each, its, 2, seed=4)
    close_to(flat(model), flat(plain))


@check
def what_is_not_finite_is_told_a_step_later_of_the_step_it_is_of() -> None:
    for name in ("dense", "topk"):
        model = wrapped()
        optimizer = sgd(model)

        def train(
            after: int, model: DDP = model, optimizer: torch.optim.SGD = optimizer, name: str = name
        ) -> None:
            with tacit.attach(model, optimizer, late(COMPRESSORS[name])):
                steps(model, optimizer, 4)
                poisoned(model, "2.weight")
                steps(model, optimizer, after)

        raises(tacit.NonFinite, lambda train=train: train(2), "2.weight on rank 1, in step 4")  # type: ignore[misc]
    model = wrapped()
    optimizer = sgd(model)
    # Nobody asks for the last round, and closing tells of it.
    raises(tacit.NonFinite, lambda: train(1, model, optimizer), "2.weight on rank 1, in step 4")
    again = wrapped()
    with tacit.attach(again, optimizer := sgd(again), "pipesgd"):
        steps(again, optimizer, 4)
    assert same_on_all_ranks(flat(again))


@check
def accumulating_with_sync_is_refused() -> None:
    model = wrapped()
    optimizer = sgd(model)

    def train() -> None:
        with tacit.attach(model, optimizer, "pipesgd"):
            steps(model, optimizer, 2)
            for _ in range(2):
                model(torch.randn(8, 20)).sum().backward()

    raises(tacit.AttachError, train, "a second backward in step 2")


@check
def a_grad_scaler_is_refused() -> None:
    model = wrapped()
    scaler = torch.amp.GradScaler("cpu")
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, sgd(model), "pipesgd", scaler=scaler),
        "scaled by another factor",
    )
    off = torch.amp.GradScaler("cpu", enabled=False)
    with tacit.attach(model, optimizer := sgd(model), "pipesgd", scaler=off):
        steps(model, optimizer, 2)


@check
def the_bare_hook_is_late_too() -> None:
    model = wrapped()
    with tacit.CommState(model, "pipesgd") as state:
        model.register_comm_hook(state, tacit.comm_hook)
        steps(model, sgd(model), 10)
        close_to(flat(model), delayed_sgd(10))


if __name__ == "__main__":
    CHECKS.run()
