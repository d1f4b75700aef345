"""What is checked of the bare hook on real Gloo processes: every function runs on all ranks of one launch."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_checks import poisoned
from rank_training import Checks, close_to, flat, raises, same_on_all_ranks, sgd, steps, trained, wrapped
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit

CHECKS = Checks()
check = CHECKS.add


def hooked(algorithm: str) -> tuple[DDP, torch.optim.SGD, tacit.CommState]:
    model = wrapped()
    state = tacit.CommState(model, algorithm)
    model.register_comm_hook(state, tacit.comm_hook)
    return model, sgd(model), state


@check
def the_hook_trains_as_attach_does_to_the_bit() -> None:
    for algorithm in ("dense", "topk:ratio=0.1", "powersgd"):
        model, optimizer, state = hooked(algorithm)
        steps(model, optimizer, 8)
        state.close()
        assert same_on_all_ranks(flat(model)), algorithm
        assert torch.equal(flat(model), trained(algorithm, 8)), algorithm


@check
def each_backward_that_exchanges_is_a_step() -> None:
    model, optimizer, state = hooked("bf16")
    with state:
        steps(model, optimizer, 4, micro=3)
        numbers = state.metrics()
        assert numbers["rounds"] == numbers["steps"] == 4
        assert abs(numbers["compression"] - 2.0) < 0.01
        assert "bf16" in state.active_path
        assert state.describe().startswith(f"{state.active_path}\n")
        assert "BF16()" in state.describe()


@check
def closed_it_averages_as_ddp_does() -> None:
    plain = wrapped()
    other = sgd(plain)
    model, optimizer, state = hooked("dense")
    steps(model, optimizer, 3)
    state.close()
    state.close()
    steps(model, optimizer, 3, seed=1)
    steps(plain, other, 3)
    steps(plain, other, 3, seed=1)
    close_to(flat(model), flat(plain))
    assert state.metrics()["rounds"] == 3


def resumed(algorithm: str, before: int, after: int, file: Path) -> tuple[Tensor, Tensor]:
    """The parameters of a run that never stopped, and of one that was saved and loaded on the way."""
    model, optimizer, state = hooked(algorithm)
    steps(model, optimizer, before, seed=1)
    states = {"model": model.module, "optimizer": optimizer, "tacit": state}
    torch.save({name: each.state_dict() for name, each in states.items()}, file)
    steps(model, optimizer, after, seed=2)
    state.close()
    again, other, state = hooked(algorithm)
    saved = torch.load(file)
    for name, each in {"model": again.module, "optimizer": other, "tacit": state}.items():
        each.load_state_dict(saved[name])
    steps(again, other, after, seed=2)
    numbers = state.metrics()
    assert numbers["steps"] == before + after
    whole = (
        2 * (dist.get_world_size() - 1) / dist.get_world_size() * sum(p.nbytes for p in again.parameters())
    )
    assert numbers["ddp_bytes_out"] == whole * after, "of the steps of this session"
    state.close()
    return flat(model), flat(again)


@check
def a_run_that_is_resumed_is_the_run_that_never_stopped() -> None:
    file = Path(sys.argv[1]) / f"{dist.get_rank()}.pt"
    for algorithm in ("dense", "topk:ratio=0.1", "powersgd"):
        for before in (1, 6):  # before and after the buckets settle
            never, stopped = resumed(algorithm, before, 4, file)
            assert torch.equal(never, stopped), f"{algorithm}, saved after {before} steps"


@check
def a_checkpoint_of_attach_fits() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "topk:ratio=0.1") as session:
        steps(model, optimizer, 5)
        _, _, state = hooked("topk:ratio=0.1")
        state.load_state_dict(session.state_dict())
        assert state.metrics()["steps"] == 5
        state.close()


@check
def an_infinity_on_one_rank_stops_all_by_name() -> None:
    for algorithm in ("dense", "topk"):
        model, optimizer, state = hooked(algorithm)
        before = flat(model)
        poisoned(model, "2.weight")
        with state:
            raises(tacit.NonFinite, lambda m=model, o=optimizer: steps(m, o, 1), "2.weight on rank 1")
            raises(tacit.NonFinite, lambda m=model, o=optimizer: steps(m, o, 1), "2.weight on rank 1")
        assert torch.equal(flat(model), before), algorithm


@check
def with_a_scaler_an_overflow_is_passed_over() -> None:
    model = wrapped()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    state = tacit.CommState(model, "topk", scaler=scaler)
    model.register_comm_hook(state, tacit.comm_hook)
    before = flat(model)
    for loss in (float("inf") if dist.get_rank() == 1 else 1.0, 1.0):
        assert torch.equal(flat(model), before)
        optimizer.zero_grad()
        scaler.scale(loss * model(torch.ones(8, 20)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state.close()
    assert not torch.equal(flat(model), before)
    assert same_on_all_ranks(flat(model))
    assert (state.metrics()["steps"], scaler.get_scale()) == (2, 128.0)


def unseen(algorithm: str) -> list[tuple[DDP, torch.optim.SGD, tacit.CommState | tacit.Attached]]:
    """Sessions that do not know of the optimizer: what the bare hook and `attach` without one make."""
    model = wrapped()
    found: list[tuple[DDP, torch.optim.SGD, tacit.CommState | tacit.Attached]]
    found = [(model, sgd(model), tacit.attach(model, None, algorithm))]
    return found if algorithm.startswith("pipesgd") else [*found, hooked(algorithm)]


@check
def without_an_optimizer_a_gradient_on_top_of_a_mean_is_refused() -> None:
    for algorithm in ("topk:ratio=0.1", "pipesgd"):
        for model, optimizer, session in unseen(algorithm):
            steps(model, optimizer, 2)
            optimizer.zero_grad()
            model(torch.ones(8, 20)).sum().backward()
            optimizer.step()
            held = [p.grad.clone() for p in model.parameters() if p.grad is not None]

            def train(session: tacit.CommState | tacit.Attached = session, model: DDP = model) -> None:
                with session:
                    model(torch.ones(8, 20)).sum().backward()

            says = (
                "all backward passes of a step but the last; or give attach the optimizers, where one steps"
            )
            raises(tacit.AttachError, train, says)
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), held, strict=True))  # type: ignore[arg-type]


@check
def without_an_optimizer_it_trains_as_with_one_however_gradients_are_cleared() -> None:
    for algorithm in ("topk:ratio=0.1", "pipesgd"):
        for micro, to_none in ((1, True), (1, False), (3, True), (3, False)):
            expected = trained(algorithm, 5, micro=micro)
            for model, optimizer, session in unseen(algorithm):
                clear = optimizer.zero_grad
                optimizer.zero_grad = lambda clear=clear, to_none=to_none: clear(to_none)  # type: ignore[method-assign]
                with session:
                    steps(model, optimizer, 5, micro=micro)
                assert torch.equal(flat(model), expected), (algorithm, micro, to_none)


@check
def without_an_optimizer_a_layer_may_be_frozen_where_ddp_looks_for_unused_parameters() -> None:
    model = wrapped(find_unused_parameters=True)
    optimizer = sgd(model)
    with tacit.attach(model, None, "topk:ratio=0.1"):
        steps(model, optimizer, 1)
        model.module[2].requires_grad_(False)
        steps(model, optimizer, 2)
    assert same_on_all_ranks(flat(model))


@check
def the_seed_is_part_of_every_draw() -> None:
    def ended(seed: int, by_hook: bool) -> Tensor:
        model = wrapped()
        optimizer = sgd(model)
        session: tacit.CommState | tacit.Attached
        if by_hook:
            session = tacit.CommState(model, "randomk:ratio=0.1", seed=seed)
            model.register_comm_hook(session, tacit.comm_hook)
        else:
            session = tacit.attach(model, optimizer, "randomk:ratio=0.1", seed=seed)
        with session:
            steps(model, optimizer, 2)
        return flat(model)

    first, again, other = ended(1, True), ended(1, False), ended(2, True)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@check
def what_does_not_fit_is_refused() -> None:
    model = wrapped()
    raises(
        tacit.AttachError,
        lambda: tacit.CommState(model, "localsgd"),
        "write tacit.attach(model, optimizer, 'localsgd')",
    )
    raises(tacit.AttachError, lambda: tacit.CommState(model, "ddp"), "register no hook, or one with 'dense'")
    raises(tacit.ConfigError, lambda: tacit.CommState(model, "dens"), "Did you mean 'dense'")
    raises(
        tacit.AttachError, lambda: tacit.CommState(model.module, "dense"), "DistributedDataParallel(model)"
    )  # type: ignore[arg-type]
    raises(tacit.ConfigError, lambda: tacit.CommState(model, "dense", seed=-1), "seed=-1")
    mine = dist.get_rank()
    raises(
        tacit.AttachError, lambda: tacit.CommState(model, "dense", seed=mine), "ranks [1] attach another seed"
    )
    state = tacit.CommState(model, "dense")
    raises(
        tacit.AttachError, lambda: tacit.CommState(model, "bf16"), "'dense' is attached to this model already"
    )
    other = wrapped()
    other.register_comm_hook(state, tacit.comm_hook)
    raises(tacit.AttachError, lambda: steps(other, sgd(other), 1), "made for another model")
    state.close()
    stateless = wrapped()
    stateless.register_comm_hook(None, tacit.comm_hook)
    raises(tacit.AttachError, lambda: steps(stateless, sgd(stateless), 1), "is a NoneType: write")


@check
def a_model_takes_one_hook_for_its_life() -> None:
    model, optimizer, state = hooked("dense")
    steps(model, optimizer, 1)
    state.close()
    raises(
        tacit.AttachError, lambda: tacit.attach(model, optimizer, "bf16"), "has a communication hook already"
    )
    model = wrapped()
    tacit.attach(model, sgd(model), "dense").close()
    raises(tacit.AttachError, lambda: tacit.CommState(model, "bf16"), "write tacit.attach")


@check
def the_hook_tells_what_it_did_when() -> None:
    model, optimizer, state = hooked("dense")
    with state:
        steps(model, optimizer, 4)
        found = state.timeline()
    assert found.levels == ("exchange",)
    assert (
        [step.step for step in found.steps] == [exchange.step for exchange in found.exchanges] == [0, 1, 2, 3]
    )


if __name__ == "__main__":
    CHECKS.run()
