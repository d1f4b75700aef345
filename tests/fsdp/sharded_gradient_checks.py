"""Gradients of models that FSDP2 shards, on real Gloo processes, in one launch with `sharded_checks`."""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from auto_checks import Fixed
from made_gpu import made_gpu
from rank_training import close_to, raises
from sharded_checks import CHECKS, Net, batch, check, folder, mesh, sgd, sharded, told, train, trained, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.compressors import PowerSGD
from tacit.errors import AttachError, ConfigError
from tacit.model.trained_model import local
from tacit.planning.profile import Profile
from tacit.planning.step_profiler import SKIPPED, STEPS
from tacit.torch_fsdp import ReduceGroup

FEEDBACK = tacit.Strategy(compressor=tacit.ErrorFeedback(tacit.TopK(ratio=0.1)))
HALVES = tuple[Tensor, Tensor]


def plain(algorithm: Any = "dense", steps: int = 4, **options: Any) -> Tensor:
    """What FSDP2 and torch's own hybrid sharding lead to, without tacit."""
    net = Net()
    for layer in (net.first, net.second, net):
        fully_shard(layer, mesh=mesh(), **options)
    train(net, sgd(net), range(steps))
    return whole(net)


# ---- laws ---------------------------------------------------------------------------------------------


@check
def dense_gradients_lead_where_ddp_does() -> None:
    """On 2x2 and 4x1; and where torch's own hybrid sharding does, too."""
    net = DDP(Net())
    train(net, sgd(net), range(5))
    for algorithm in ("ddp", "dense", "topk:ratio=1.0"):
        close_to(trained(algorithm), whole(net))
    close_to(plain(steps=5), whole(net))
    on = mesh(4, 1)
    alone = sharded(on)
    optimizer = sgd(alone)
    with tacit.attach(alone, optimizer, "dense", mesh=on) as session:
        train(alone, optimizer, range(5))
        assert session.metrics()["rounds"] == 5
    close_to(whole(alone), whole(net))


@check
def gradients_along_a_far_axis_of_one_are_fsdp2s() -> None:
    on = mesh(1, 4)
    net, averaged = sharded(on), sharded(on)
    train(net, sgd(net), range(4))
    optimizer = sgd(averaged)
    with tacit.attach(averaged, optimizer, "dense", mesh=on):
        train(averaged, optimizer, range(4))
    assert torch.equal(whole(net), whole(averaged))


@check
def a_discarded_step_leaves_no_trace() -> None:
    """Also where gradients stay inside a replica, between whose ranks they must agree on it."""

    def spiked(algorithm: str, discards: bool) -> Tensor:
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, algorithm, mesh=mesh()) as session:
            for step in range(3):
                if step == 1 and discards:
                    optimizer.zero_grad()
                    (1e3 * net(batch(9, dist.get_rank())).square().mean()).backward()
                    assert session.discard(dist.get_rank() == 1)
                train(net, optimizer, [step])
        return whole(net)

    for algorithm in ("topk:ratio=0.1", "localsgd:sync_every=2", "ddp"):
        assert torch.equal(spiked(algorithm, True), spiked(algorithm, False)), algorithm


@check
def gradients_travel_by_every_kind_of_compressor() -> None:
    """That replicas stay equal is what `trained` holds."""
    dense = trained("dense", 3)
    for algorithm in (
        *("bf16", "signsgd", "int8", "int8:topology=two-phase", "qsgd:bits=4", "terngrad", "natural"),
        *("topk:ratio=0.1", "gtopk:ratio=0.1", "randomk:ratio=0.1", "powersgd:rank=1"),
    ):
        mine = trained(algorithm, 3)
        assert 0 < float((mine - dense).abs().max()) < 1, algorithm


@check
def what_was_sent_and_what_is_owed_is_the_gradient() -> None:
    """A twin without a session has this replica's gradients, as a rate of nearly nothing trains neither."""
    far = mesh().get_group("far")
    net, twin = sharded(), sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)
    applied: dict[str, Any] = dict.fromkeys(dict(net.named_parameters()), 0)
    given = dict(applied)
    with tacit.attach(net, optimizer, FEEDBACK, mesh=mesh()) as session:
        for step in range(3):
            train(net, optimizer, [step])
            train(twin, torch.optim.SGD(twin.parameters(), lr=1e-30), [step])
            for of, sums in ((net, applied), (twin, given)):
                for name, p in of.named_parameters():
                    sums[name] = sums[name] + local(p.grad)
        kept = session.session.store.named_state()
        shard = 4 * sum(local(p).numel() for p in net.parameters())
        assert 0 < session.footprint()["residual"] <= shard
        for name, sum_ in given.items():
            owed = kept[name, "residual"].tensor.clone() if (name, "residual") in kept else sum_.new_zeros(0)
            assert bool(owed.any()) == (name.endswith("weight") and sum_.numel() > 0), name
            whole_ = sum_ - (owed.view(sum_.shape) if owed.numel() else 0)
            dist.all_reduce(whole_, group=far)
            if sum_.numel():
                close_to(whole_ / 2, applied[name])


@check
def what_auto_chooses_leads_where_it_leads_attached_behind_that_step() -> None:
    for algorithm in ("ddp", "bf16", "topk:ratio=0.1", "diloco:sync_every=2"):
        chosen, named, decider = sharded(mesh()), sharded(mesh()), Fixed(algorithm)
        first, second = sgd(chosen), sgd(named)
        with tacit.attach(chosen, first, "auto:accept=periodic", mesh=mesh(), decider=decider) as session:
            train(chosen, first, range(3))
            left_out = dict(session.candidates().left_out)  # type: ignore[attr-defined]
            train(chosen, first, range(3, 8))
        with tacit.attach(named, second, "dense", mesh=mesh()):
            train(named, second, range(8 if algorithm == "ddp" else 3))
        with tacit.attach(named, second, algorithm, mesh=mesh()):
            train(named, second, range(8 if algorithm == "ddp" else 3, 8))
        assert torch.equal(whole(chosen), whole(named)), algorithm
        assert [text.partition(":")[0] for text in left_out] == ["dgc", "onebit-adam", "zeroone-adam", "daso"]
        assert (decider.measured, decider.decided) == ([3], int(dist.get_rank() == 0))


@check
def auto_chooses_for_shards_by_a_gpus_clock() -> None:
    """Whose sizes differ between the ranks of a replica; all go by the profile of the first."""
    with made_gpu(1e3):
        net = sharded(mesh())
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "auto", mesh=mesh()) as session:
            train(net, optimizer, range(14))
            choice = session.choice
            assert choice is not None
            assert "on the GPU in stream order" in session.active_path
            # The near axis goes by the same slow wire, and is in what FSDP2 computes.
            assert choice.seconds < 0.95 * (dict(choice.considered)["ddp"] or 0.0), choice
            train(net, optimizer, range(14, 16))


@check
def a_profile_of_shards_says_how_many_ranks_share_a_replica() -> None:
    out = folder() / "profile.json"
    os.environ["TACIT_STEP_PROFILE"] = str(out)
    try:
        net = sharded(mesh())
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "dense", mesh=mesh()):
            train(net, optimizer, range(SKIPPED + STEPS + 1))
    finally:
        del os.environ["TACIT_STEP_PROFILE"]
    dist.barrier()
    profile = Profile.load(out)
    assert profile.shards == 2
    raises(ConfigError, profile.check_whole, "2 ranks share a replica")


@check
def half_batches_are_exchanged_once_a_step() -> None:
    """By either of FSDP2's flags, and by the last flag of a step that is left on, in every backward."""

    def halves(flag: Callable[[Any, bool], None], algorithm: Any) -> tuple[Tensor, float]:
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, algorithm, mesh=mesh()) as session:
            for step in range(4):
                optimizer.zero_grad()
                for last, x in enumerate(batch(step, dist.get_rank()).chunk(2)):
                    flag(net, bool(last))
                    (0.5 * (net(x) - x.sum(1, keepdim=True)).square().mean()).backward()
                optimizer.step()
            return whole(net), session.metrics()["rounds"]

    def neither(net: Any, last: bool) -> None:
        pass

    for algorithm in ("dense", FEEDBACK):
        at_once = trained(algorithm, 4)
        for flag in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            found, rounds = halves(lambda net, last, flag=flag: getattr(net, flag)(last), algorithm)  # type: ignore[misc]
            close_to(found, at_once)
            assert rounds == 4, flag
    found, rounds = halves(neither, "dense")
    close_to(found, trained("dense", 4))
    assert rounds == 8


@check
def sums_are_for_losses_that_are_divided_by_all() -> None:
    """As torchtitan does it; Gloo cannot scale while it sums."""

    def total(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            x = batch(step, dist.get_rank())
            optimizer.zero_grad()
            ((net(x) - x.sum(1, keepdim=True)).square().sum() / 32).backward()
            optimizer.step()

    found = []
    for factor, reduction in ((1.0, "sum"), (0.5, "mean"), (4.0, "sum")):
        net = sharded()
        for module in (net.first, net.second, net):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "dense", mesh=mesh(), reduction=reduction):  # type: ignore[arg-type]
            total(net, optimizer)
        found.append(whole(net))
    at_once = trained("dense", 4)
    close_to(found[0], at_once)
    close_to(found[1], at_once)
    assert float((found[2] - at_once).abs().max()) > 1e-3  # what the law would not forgive


@check
def gradients_of_another_type_travel_as_the_parameters() -> None:
    for policy in (MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        net = Net()
        for layer in (net.first, net.second, net):
            fully_shard(layer, mesh=mesh()["near"], mp_policy=policy)
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "dense", mesh=mesh()):
            train(net, optimizer, range(4))
        close_to(whole(net), plain(mp_policy=policy), 2e-3)


# ---- how it runs --------------------------------------------------------------------------------------


@check
def backward_goes_on_while_gradients_travel() -> None:
    """The lane is held up until backward has come to the first layer: it would wait in vain for who waits."""
    net = sharded()
    optimizer = sgd(net)
    reached, found = threading.Event(), []
    net.first.register_forward_hook(lambda *given: given[2].register_hook(lambda _: reached.set()) and None)

    def held() -> Iterator[Any]:
        found.append(reached.wait(20))
        yield from ()

    with tacit.attach(net, optimizer, "dense", mesh=mesh()) as session:
        lanes = session.session.lanes
        lanes.submit_on_host(lanes.job("held", held, lambda *_: None, lambda: None))  # type: ignore[arg-type]
        train(net, optimizer, range(1))
    assert found == [True]
    close_to(whole(net), trained("dense", 1))


@check
def who_looks_at_a_gradient_sees_the_mean() -> None:
    """A hook of a parameter, and gradients that are kept and zeroed, both have the mean there at once."""
    far, seen = mesh().get_group("far"), []
    net = sharded()
    optimizer = sgd(net)
    net.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(local(p.grad).clone()))
    with tacit.attach(net, optimizer, "dense", mesh=mesh()):
        train(net, optimizer, range(1))
        both = [torch.empty_like(seen[0]) for _ in range(2)]
        dist.all_gather(both, seen[0], group=far)
        assert torch.equal(*both)
        assert torch.equal(seen[0], local(net.second.weight.grad))
    kept = sharded()
    optimizer = sgd(kept)
    optimizer.zero_grad = lambda: [p.grad.zero_() for p in kept.parameters() if p.grad is not None]  # type: ignore[assignment,return-value]
    with tacit.attach(kept, optimizer, "dense", mesh=mesh()):
        train(kept, optimizer, range(3))
    assert torch.equal(whole(kept), trained("dense", 3))


@check
def closed_it_leaves_fsdp2_as_it_was() -> None:
    net, twin = sharded(), sharded()
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, "topk", mesh=mesh()):
        assert all(group.has_hook for group in ReduceGroup.all_of(net))
    assert [group.has_hook for group in ReduceGroup.all_of(net)] == [False] * 3
    train(net, optimizer, range(2))
    train(twin, sgd(twin), range(2))
    assert torch.equal(whole(net), whole(twin))
    with tacit.attach(net, optimizer, "topk", mesh=mesh()):
        train(net, optimizer, range(1))


# ---- checkpoints --------------------------------------------------------------------------------------


@check
def gradients_go_on_where_they_stopped() -> None:
    for strategy in (FEEDBACK, tacit.Strategy(compressor=tacit.ErrorFeedback(PowerSGD(rank=1)))):
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, strategy, mesh=mesh()) as session:
            train(net, optimizer, range(5))
            files = [io.BytesIO() for _ in range(3)]
            for file, each in zip(files, (net, optimizer, session), strict=True):
                torch.save(each.state_dict(), file)
            at = folder()
            dcp.save({"session": session}, checkpoint_id=at)
            owed = told(session, mesh().get_group("near"))
            assert tuple(owed[f"rank{dist.get_rank() // 2}/0/second.weight/residual"].shape) == (41, 3)
            train(net, optimizer, range(5, 8))
        for how in ("files", "dcp"):
            again = sharded()
            other = sgd(again)
            with tacit.attach(again, other, strategy, mesh=mesh()) as session:
                for file, each in zip(
                    files, (again, other, session if how == "files" else None), strict=True
                ):
                    file.seek(0)
                    if each is not None:
                        each.load_state_dict(torch.load(file, weights_only=False))
                if how == "dcp":
                    dcp.load({"session": session}, checkpoint_id=at)
                train(again, other, range(5, 8))
            assert torch.equal(whole(again), whole(net)), how


@check
def residuals_go_to_another_near_axis() -> None:
    """One rank of each replica goes on alone, with what its replica owes: saved sharded, loaded whole."""
    at, net = folder(), sharded()
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, FEEDBACK, mesh=mesh()) as session:
        train(net, optimizer, range(3))
        dcp.save({"session": session}, checkpoint_id=at)
        before = told(session, mesh().get_group("near"))
    lonely = dist.get_rank() in (0, 2)
    groups = [dist.new_group([first, second]) for first, second in ((0, 2), (1, 3))]
    if lonely:
        own = torch.distributed.device_mesh.DeviceMesh("cpu", [[0], [2]], mesh_dim_names=("far", "near"))
        again = Net()
        for layer in (again.first, again.second, again):
            fully_shard(layer, mesh=own["near"])
        with tacit.attach(again, sgd(again), FEEDBACK, mesh=own) as session:
            dcp.load({"session": session}, checkpoint_id=at, process_group=groups[0])
            after = told(session, own.get_group("near"))
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
    dist.barrier()


# ---- what is refused ----------------------------------------------------------------------------------


@check
def what_gradients_of_shards_cannot_do_is_refused() -> None:
    def refused(says: str, algorithm: Any, **options: Any) -> None:
        net = options.pop("net", None) or sharded()
        raises(
            AttachError, lambda: tacit.attach(net, sgd(net), algorithm, **{"mesh": mesh(), **options}), says
        )

    refused("'pipesgd' applies a gradient one step late, which is not supported on sharded", "pipesgd")
    refused("'dgc' takes over the optimizer's momentum, which is not supported on sharded models", "dgc")
    refused("attach 'lowbit' with Adam or AdamW, or for long trainings 'localsgd'", "onebit-adam")
    refused("'zeroone-adam' averages gradients along both axes in some steps, which is not", "zeroone-adam")
    refused("attach 'lowbit' with Adam or AdamW, or for long trainings 'localsgd'", "zeroone-adam")
    refused("'ps' uses parameter servers, and these take whole parameters", "ps")
    by_node = tacit.Strategy(compressor=tacit.TopK(), topology=tacit.Hierarchical())
    refused("and topology=Flat() in Python", by_node)
    refused("scaler= is not supported", "topk", scaler=torch.amp.GradScaler("cpu"))
    refused("reduction='sum' is for the gradients of sharded models", "diloco", reduction="sum")
    refused("reduction='sum' is for the gradients of sharded models", "topk", net=DDP(Net()), reduction="sum")
    hooked = sharded()
    hooked.second.set_all_reduce_hook(lambda flat: None)
    refused("second.weight is of a module that has an all-reduce hook already", "topk", net=hooked)
    rank = dist.get_rank()
    own = "sum" if rank // 2 else "mean"
    says = f"ranks [{2 + rank % 2}] attach another reduction than rank {rank % 2}: "
    refused(says, "topk", reduction=own)


class Choosy(nn.Module):
    """`uses` names the layers that forward takes, in order; "s" the spare parameter beside a shift."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.uses = nn.Linear(20, 20), nn.Linear(20, 20), uses
        self.shift, self.spare = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        for layer in (self.a, self.b):
            fully_shard(layer, mesh=mesh()["near"])

    def forward(self, x: Tensor) -> Tensor:
        for name in self.uses.removesuffix("s"):
            x = getattr(self, name)(x)
        y = x + self.shift.sum()
        return y + self.spare.sum() if "s" in self.uses else y


@check
def gradients_that_do_not_come_are_an_error() -> None:
    def trains(uses: str, prepare: Callable[[Any], None] = lambda net: None, says: str = "") -> None:
        net: Any = fully_shard(Choosy(uses), mesh=mesh()["near"])
        prepare(net)
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "dense", mesh=mesh()):
            if says:
                raises(AttachError, lambda: train(net, optimizer, range(1)), says)
            else:
                train(net, optimizer, range(1))
            dist.barrier()

    trains("abs")
    trains("aabs")
    trains("as", says="gave no gradient to b.weight, nor to anything else")
    trains("ab", says="with shift 2 of 4 entries have had a gradient")
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # since torch 2.13
        trains("ab", lambda net: net.set_reduce_scatter_unused_params(True))
    says = "write model.set_requires_all_reduce(is_last) before each backward"
    trains("abs", lambda net: net.set_requires_all_reduce(False), says)
    net: Any = fully_shard(Choosy("abs"), mesh=mesh()["near"])
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, "dense", mesh=mesh()):
        train(net, optimizer, range(1))
        net.a(batch(0, 0)).sum().backward()
        says = "a.weight has two gradients before shift has one"
        raises(AttachError, lambda: net.a(batch(0, 0)).sum().backward(), says)
        dist.barrier()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:])
