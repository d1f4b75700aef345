"""What is checked on real Gloo processes: every function here runs on all ranks of one launch."""

import json
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.engine import drive
from tacit.transports.torch import TorchTransport

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "compressors"))
from laws import Peers, tensors
from table import NUMEL, TABLE

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


# ---- a model and its training -------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 5))


def wrapped(model: nn.Module | None = None, **options: object) -> DDP:
    # 0.2 MiB: several buckets, as large models have.
    return DDP(model or network(), bucket_cap_mb=0.2, gradient_as_bucket_view=True, **options)


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def steps(model: DDP, optimizer: torch.optim.Optimizer, count: int, seed: int = 0, micro: int = 1) -> None:
    """`count` steps on data of this rank's own; `micro` backward passes a step, all but the last unsynced."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad()
        for i in range(micro):
            x = torch.randn(8, 20, generator=generator)
            y = torch.randint(0, 5, (8,), generator=generator)
            if i < micro - 1:
                with model.no_sync():
                    nn.functional.cross_entropy(model(x), y).backward()
            else:
                nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def everywhere(x: Tensor) -> list[Tensor]:
    all_ = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(all_, x)
    return all_


def same_on_all_ranks(x: Tensor) -> bool:
    return all(torch.equal(x, other) for other in everywhere(x))


def trained(algorithm: str, count: int = 10, momentum: float = 0.9, micro: int = 1) -> Tensor:
    """The parameters after training; equal on all ranks, to the bit."""
    model = wrapped()
    optimizer = sgd(model, momentum)
    with tacit.attach(model, optimizer, algorithm):
        steps(model, optimizer, count, micro=micro)
    assert same_on_all_ranks(flat(model)), f"{algorithm}: ranks differ"
    return flat(model)


def close_to(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> None:
    worst = float((a - b).abs().max())
    assert worst <= tolerance, f"they differ by {worst}"


def raises(kind: type[Exception], call: Callable[[], object], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        call()


# ---- the checks ---------------------------------------------------------------------------------------


@check
def gloo_gives_the_numbers_of_the_loopback() -> None:
    peers, rank = dist.get_world_size(), dist.get_rank()
    transport = TorchTransport(dist.group.WORLD, timedelta(seconds=30))
    transport.open(stages=2)
    for name, row in TABLE.items():
        loopback, here = Peers(row.compressor, peers, NUMEL), Peers(row.compressor, peers, NUMEL)
        for seed in range(3):
            expected = loopback.exchange(tensors(peers, NUMEL, seed))[rank]
            x, out = tensors(peers, NUMEL, seed)[rank], torch.empty(NUMEL)
            from tacit.topologies import Flat

            before = transport.sent
            talk = Flat().conduct(x, row.compressor, here.states[rank], here._context(rank, out))
            outcome = drive(talk, transport)
            here.states[rank] = outcome.state
            here.round += 1
            # The order of summation differs, and the type in which it rounds.
            close_to(
                outcome.mean, expected.mean, max(1e-5, 10 * row.rounding * float(expected.mean.abs().max()))
            )
            assert same_on_all_ranks(outcome.mean), name
            assert transport.sent - before == row.sent(peers), name


@check
def dense_is_ddp() -> None:
    close_to(trained("dense"), trained("ddp"))


@check
def dense_is_ddp_with_accumulated_gradients() -> None:
    close_to(trained("dense", micro=3), trained("ddp", micro=3))


@check
def everything_kept_is_ddp() -> None:
    close_to(trained("topk:ratio=1.0"), trained("ddp"))


@check
def a_period_of_one_is_ddp() -> None:
    for momentum in (0.0, 0.9):
        close_to(trained("localsgd:sync_every=1", momentum=momentum), trained("ddp", momentum=momentum))


@check
def bf16_stays_near_ddp() -> None:
    ddp, bf16 = trained("ddp"), trained("bf16")
    assert not torch.equal(ddp, bf16)
    close_to(bf16, ddp, 5e-3)


@check
def every_compressing_algorithm_keeps_ranks_equal_and_learns() -> None:
    ddp = trained("ddp", 20)
    start = flat(network())
    for algorithm in ("topk:ratio=0.1", "sign", "randomk:ratio=0.2", "powersgd:rank=2"):
        there = trained(algorithm, 20)
        # It has gone the way that ddp went: more than half of the distance is behind it.
        assert float((there - ddp).norm()) < 0.75 * float((start - ddp).norm()), algorithm


@check
def powersgd_runs_with_many_buckets() -> None:
    model = wrapped(nn.Sequential(*(nn.Linear(20, 20) for _ in range(12)), nn.Linear(20, 5)))
    model = DDP(model.module, bucket_cap_mb=0.003, gradient_as_bucket_view=True)
    optimizer = sgd(model, momentum=0.0)
    with tacit.attach(model, optimizer, "powersgd:rank=1") as session:
        steps(model, optimizer, 12)
        assert len(session.session.lots) > 4
        assert session.session.stages >= 2
    assert same_on_all_ranks(flat(model))


@check
def replicas_drift_and_meet_again() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "localsgd:sync_every=4") as session:
        steps(model, optimizer, 3)
        assert not same_on_all_ranks(flat(model))
        steps(model, optimizer, 1)
        assert same_on_all_ranks(flat(model))
        assert session.metrics()["rounds"] == 1
        steps(model, optimizer, 1)
        before = torch.stack(everywhere(flat(model))).mean(0)
        session.sync()
        close_to(flat(model), before)


@check
def detached_it_trains_as_before_and_attaches_again() -> None:
    model, plain = wrapped(), wrapped()
    optimizer, other = sgd(model), sgd(plain)
    for algorithm in ("dense", "localsgd:sync_every=1", "dense"):
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, 5)
        steps(plain, other, 5)
        steps(model, optimizer, 2, seed=1)
        steps(plain, other, 2, seed=1)
        close_to(flat(model), flat(plain))


@check
def the_bytes_are_those_of_the_formula() -> None:
    peers = dist.get_world_size()
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "topk:ratio=0.01") as session:
        steps(model, optimizer, 6)
        expected = 0
        for lot in session.session.lots:
            sizes = [(slot.stop - slot.start, slot.name.endswith("weight")) for slot in lot.slots]
            weights, biases = (
                sum(n for n, is_weight in sizes if is_weight is kind) for kind in (True, False)
            )
            if weights:  # values and positions, biases, and one float a peer that tells of a NaN
                expected += (peers - 1) * (8 * -(-lot.numel // 100) + 4 * biases + 4 * peers)
            else:
                expected += -(-2 * (peers - 1) * 4 * biases // peers)
        assert session.session.records[-1].bytes_out == expected


@check
def lots_settle_on_the_buckets_of_ddp() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "topk") as session:
        guessed = [[slot.name for slot in lot.slots] for lot in session.session.lots]
        steps(model, optimizer, 4)
        door = session._gradient_door
        assert door is not None
        assert guessed != [[slot.name for slot in lot.slots] for lot in session.session.lots]
        assert not door._staged, "a bucket is still copied"


@check
def frozen_shared_and_unused_parameters_work() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.unused = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 20)
            self.frozen, self.out = nn.Linear(20, 20), nn.Linear(20, 5)
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.frozen(self.b(self.a(x).relu())))
            return y

    for algorithm in ("dense", "topk:ratio=1.0", "localsgd:sync_every=1"):
        found = []
        for each in ("ddp", algorithm):
            model = wrapped(Odd(), find_unused_parameters=True)
            optimizer = sgd(model)
            with tacit.attach(model, optimizer, each):
                steps(model, optimizer, 6)
            found.append(flat(model))
        close_to(*found)


@check
def buffers_are_left_alone_between_rounds_and_averaged_in_them() -> None:
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)))
    optimizer = sgd(model)
    norm = model.module[1]
    with tacit.attach(model, optimizer, "localsgd:sync_every=3"):
        steps(model, optimizer, 2)
        assert not same_on_all_ranks(norm.running_mean)
        steps(model, optimizer, 1)
        assert same_on_all_ranks(norm.running_mean)
    assert model.broadcast_buffers


@check
def a_policy_overrides_the_default() -> None:
    model = wrapped()
    optimizer = sgd(model)

    def policy(name: str, p: Tensor) -> tacit.Dense | tacit.BF16 | None:
        return tacit.BF16() if name.startswith("4") else None

    with tacit.attach(model, optimizer, "topk", policy=policy) as session:
        used = {repr(lot.compressor) for lot in session.session.lots}
        assert any("BF16" in each for each in used)
        assert not any("TopK" in each for each in used)
        steps(model, optimizer, 5)
        assert same_on_all_ranks(flat(model))


def resumed(algorithm: str, before: int, after: int, folder: Path, by: str) -> tuple[Tensor, Tensor]:
    """The parameters of a run that never stopped, and of one that was saved and loaded on the way."""
    ends = []
    model, again = wrapped(), wrapped()
    optimizer, other = sgd(model), sgd(again)
    with tacit.attach(model, optimizer, algorithm) as session:
        steps(model, optimizer, before, seed=1)
        mine = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(mine | {"session": session.state_dict()}, folder / f"{dist.get_rank()}.pt")
        if by == "dcp":
            dcp.save({"session": session}, checkpoint_id=folder / "dcp")
        steps(model, optimizer, after, seed=2)
        ends.append(flat(model))
    saved = torch.load(folder / f"{dist.get_rank()}.pt")
    again.module.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    with tacit.attach(again, other, algorithm) as session:
        if by == "dcp":
            dcp.load({"session": session}, checkpoint_id=folder / "dcp")
        else:
            session.load_state_dict(saved["session"])
        steps(again, other, after, seed=2)
        ends.append(flat(again))
    return ends[0], ends[1]


@check
def a_run_that_is_resumed_is_the_run_that_never_stopped() -> None:
    folder = Path(sys.argv[1])
    for algorithm in (
        "dense",
        "bf16",
        "topk:ratio=0.1",
        "sign",
        "randomk:ratio=0.1",
        "powersgd",
        "localsgd:sync_every=4",
    ):
        for before in (1, 2, 6):  # before, while and after the lots settle
            never, stopped = resumed(algorithm, before, 5, folder, "torch")
            assert torch.equal(never, stopped), f"{algorithm}, saved after {before} steps"


@check
def distributed_checkpoints_keep_what_is_each_ranks_own() -> None:
    folder = Path(sys.argv[1])
    for algorithm in ("topk:ratio=0.1", "powersgd", "localsgd:sync_every=4"):
        never, stopped = resumed(algorithm, 6, 5, folder, "dcp")
        assert torch.equal(never, stopped), algorithm


@check
def a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "topk:ratio=0.1") as session:
        steps(model, optimizer, 2)
        good = session.state_dict()
        key = next(k for k in good if k.startswith(f"rank{dist.get_rank()}/"))
        for bad, says in (
            (good | {"strategy": "another"}, "the checkpoint is of another, and attached is Strategy("),
            (good | {"ranks": 7}, "of 7 ranks, and these are 4"),
            (good | {"version": 99}, "update tacit"),
            ({k: v for k, v in good.items() if k != key}, f"lacks {key!r}"),
            (good | {key: torch.zeros(3)}, "has another shape"),
            (good | {"lots": [["x"]]}, "of another model"),
            ({}, "cut short"),
        ):
            raises(tacit.CheckpointError, lambda bad=bad: session.load_state_dict(bad), says)
        after = session.state_dict()
        assert all(torch.equal(good[k], after[k]) for k in good if isinstance(good[k], Tensor))
        session.load_state_dict(good)


def poisoned(model: DDP, name: str) -> None:
    """From now on the gradient of `name` holds one infinity on rank 1."""
    if dist.get_rank() == 1:

        def infect(g: Tensor) -> Tensor:
            g = g.clone()
            g.view(-1)[g.numel() // 2] = float("inf")
            return g

        dict(model.module.named_parameters())[name].register_hook(infect)


@check
def an_infinity_on_one_rank_stops_all_by_name() -> None:
    for algorithm in ("dense", "bf16", "topk", "localsgd:sync_every=1"):
        model = wrapped()
        optimizer = sgd(model)
        before = flat(model)

        def train(
            model: DDP = model, optimizer: torch.optim.SGD = optimizer, algorithm: str = algorithm
        ) -> None:
            with tacit.attach(model, optimizer, algorithm):
                poisoned(model, "2.weight")
                steps(model, optimizer, 1)

        raises(tacit.NonFinite, train, "2.weight on rank 1")
        if not algorithm.startswith("localsgd"):
            assert torch.equal(flat(model), before), f"{algorithm}: the step was taken"


@check
def what_does_not_fit_is_refused() -> None:
    model = wrapped()
    optimizer = sgd(model)
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model.module, optimizer, "dense"),
        "DistributedDataParallel(model)",
    )  # type: ignore[arg-type]
    raises(tacit.ConfigError, lambda: tacit.attach(model, optimizer, "dens"), "Did you mean 'dense'")
    raises(tacit.AttachError, lambda: tacit.attach(model, None, "localsgd"), "give attach the optimizer")
    raises(tacit.AttachError, lambda: tacit.attach(model, sgd(network()), "dense"), "holds no parameter")
    with tacit.attach(model, optimizer, "dense"):
        raises(
            tacit.AttachError,
            lambda: tacit.attach(model, optimizer, "bf16"),
            "'dense' is attached to this model already",
        )
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    taken = wrapped()
    taken.register_comm_hook(None, allreduce_hook)
    raises(
        tacit.AttachError,
        lambda: tacit.attach(taken, sgd(taken), "dense"),
        "has a communication hook already",
    )


@check
def ranks_that_mean_different_things_are_refused() -> None:
    model = wrapped()
    mine = "topk" if dist.get_rank() == 1 else "dense"
    raises(
        tacit.AttachError, lambda: tacit.attach(model, sgd(model), mine), "ranks [1] attach another strategy"
    )


@check
def the_environment_chooses() -> None:
    import os

    assert tacit.from_env() == tacit.Strategy(subject="nothing")
    os.environ["TACIT_ALGORITHM"] = "topk:ratio=0.5"
    try:
        assert tacit.from_env().compressor == tacit.ErrorFeedback(tacit.TopK(ratio=0.5))
        os.environ["TACIT_ALGORITHM"] = "topk:ratio=5"
        raises(tacit.ConfigError, tacit.from_env, "environment variable TACIT_ALGORITHM='topk:ratio=5'")
    finally:
        del os.environ["TACIT_ALGORITHM"]


@check
def numbers_of_a_session() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "bf16") as session:
        steps(model, optimizer, 5)
        numbers = session.metrics()
        assert numbers["rounds"] == numbers["steps"] == 5
        assert abs(numbers["compression"] - 2.0) < 0.01
        assert 0 <= numbers["exposed_seconds"] <= numbers["exchange_seconds"]
        assert 0 < numbers["compute_share"] < 1
        assert "bf16" in session.active_path
        assert "gloo" in session.active_path


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name, function in CHECKS.items():
        error = None
        try:
            function()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
