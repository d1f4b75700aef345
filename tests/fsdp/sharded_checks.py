"""Models that FSDP2 shards, on real Gloo processes: 2 replicas of 2 ranks, unless a check says otherwise."""

import io
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_runs import SHARDED, goes_on
from rank_training import Checks, close_to, raises, same_on_all_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.compressors import Int8, PowerSGD, Sign
from tacit.errors import AttachError, CheckpointError
from tacit.merges import Average, OuterStep
from tacit.overlap import Delayed
from tacit.rounds import ByVariance, Every

CHECKS = Checks()
check = CHECKS.add
AXES = ("far", "near")


class Net(nn.Module):
    """3 and 41 rows do not divide by two, and of the last layer's single row one rank has nothing.

    So the ranks of a replica would cut their shards into other fragments than the whole.
    """

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(20, 3), nn.Linear(3, 41), nn.Linear(41, 1)
        self.norm = nn.BatchNorm1d(41) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.second(self.first(x).relu())).relu())
        return y


_MESHES: dict[tuple[int, int], DeviceMesh] = {}


def mesh(far: int = 2, near: int = 2) -> DeviceMesh:
    """Of all ranks; making one is a collective call, and no process has more than it needs."""
    if (far, near) not in _MESHES:
        _MESHES[far, near] = init_device_mesh("cpu", (far, near), mesh_dim_names=AXES)
    return _MESHES[far, near]


def sharded(on: DeviceMesh | None = None, norm: bool = False) -> Any:
    near = (on or mesh())["near"]
    net = Net(norm)
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=near)
    return fully_shard(net, mesh=near)


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    ranks: Iterable[int] | None = None,
    after: Callable[[int, Tensor], None] = lambda step, loss: None,
) -> None:
    """`ranks`: whose batches are this replica's; this rank's own where not given."""
    for step in steps:
        x = torch.cat([batch(step, rank) for rank in ranks or [dist.get_rank()]])
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        after(step, loss)
        loss.backward()
        optimizer.step()


def whole(net: nn.Module) -> Tensor:
    """All parameters of this replica."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in found])


def trained(algorithm: Any, steps: int = 5, **options: Any) -> Tensor:
    net = sharded()
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, algorithm, **{"mesh": mesh(), **options}):
        train(net, optimizer, range(steps))
    assert same_on_all_ranks(whole(net)), f"{algorithm}: replicas differ"
    return whole(net)


# ---- laws ---------------------------------------------------------------------------------------------


@check
def sharded_replicas_learn_what_whole_ones_do() -> None:
    """Each rank is a whole replica of DDP with its node's batch, beside its shard of FSDP2's."""
    far = mesh().get_group("far")
    node = dist.get_rank() // 2 * 2
    for algorithm in (
        "diloco:sync_every=2",
        "localsgd:sync_every=2,momentum=averaged",
        "desloc:sync_every=2,first_every=1",
        "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1,bits=32",
        "easgd:sync_every=2",
    ):
        net = DDP(Net(), process_group=far)
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, algorithm):
            train(net, optimizer, range(5), [node, node + 1])
        close_to(trained(algorithm), whole(net))


@check
def adams_variance_is_scaled_alike_on_all_shards() -> None:
    """By what whole parameters would be scaled by, up to the sample; all ranks save the same."""
    text, far = "lowbit:bits=8,sync_every=2", mesh().get_group("far")
    node = dist.get_rank() // 2 * 2

    def adam(net: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.9, 0.9))

    plain = DDP(Net(), process_group=far)
    optimizer = adam(plain)
    with tacit.attach(plain, optimizer, text) as session:
        train(plain, optimizer, range(17), [node, node + 1])
        expected = json.loads(session.state_dict()["variances"])["0"]["squares"]
    net = sharded()
    optimizer = adam(net)
    with tacit.attach(net, optimizer, text, mesh=mesh()) as session:
        train(net, optimizer, range(17))
        variances = session.state_dict()["variances"]
        found = json.loads(variances)["0"]["squares"]
        assert len({*gathered_texts(variances)}) == 1
    assert [*found] == [*expected]
    for name, (own, common, step) in found.items():
        theirs = expected[name]
        assert step == theirs[2] == 15
        assert abs(own - theirs[0]) <= 0.1 * theirs[0], name
        assert abs(common - theirs[1]) <= 0.1 * theirs[1], name
    assert same_on_all_ranks(whole(net))


def gathered_texts(mine: str) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


@check
def a_far_axis_of_one_is_plain_fsdp2() -> None:
    on = mesh(1, 4)
    plain, averaged = sharded(on), sharded(on)
    train(plain, sgd(plain), range(7))
    optimizer = sgd(averaged)
    with tacit.attach(averaged, optimizer, "localsgd:sync_every=2", mesh=on) as session:
        train(averaged, optimizer, range(7))
        assert session.metrics()["rounds"] == 3
    assert torch.equal(whole(plain), whole(averaged))
    outer = sharded(on)
    optimizer = sgd(outer)
    with tacit.attach(outer, optimizer, "snoo:sync_every=2,outer_lr=1.0,outer_momentum=0.0", mesh=on):
        train(outer, optimizer, range(7))
    close_to(whole(outer), whole(plain), 1e-6)


@check
def a_near_axis_of_one_is_ddp() -> None:
    on = mesh(4, 1)
    net = DDP(Net())
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, "diloco:sync_every=3,bits=4"):
        train(net, optimizer, range(7))
    shards = sharded(on)
    optimizer = sgd(shards)
    with tacit.attach(shards, optimizer, "diloco:sync_every=3,bits=4", mesh=on):
        train(shards, optimizer, range(7))
    close_to(whole(shards), whole(net), 2e-6)


@check
def levels_leave_the_near_one_to_fsdp2() -> None:
    flat = trained("localsgd:sync_every=3")
    assert torch.equal(trained("ednncomm:sync_every=3"), flat)
    assert torch.equal(trained("localsgd:sync_every=3", mesh=None, group=mesh().get_group("far")), flat)


@check
def all_shards_go_by_the_same_facts() -> None:
    """The losses of a replica's ranks differ, and the replica has one period."""
    for algorithm, known in (
        ("adacomm:sync_every=4,interval=4", {}),
        ("qsr:sync_every=2", {}),
        (
            "daso:warmup_epochs=0,cooldown_epochs=0,patience=0,threshold=0.9",
            {"steps_per_epoch": 4, "epochs": 6},
        ),
    ):
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, algorithm, mesh=mesh(), **known) as session:  # type: ignore[arg-type]
            first = dict(session.session.schedule.state)
            train(
                net,
                optimizer,
                range(12),
                after=lambda step, loss: session.observe((1 + dist.get_rank()) * loss),
            )
            state = session.session.schedule.state
            assert state != first
            said = torch.tensor([*state.values()], dtype=torch.float64)
        assert same_on_all_ranks(said), state
        assert same_on_all_ranks(whole(net))


@check
def every_kind_of_compressor_takes_shards() -> None:
    feedback = [tacit.ErrorFeedback(each) for each in (tacit.TopK(ratio=0.1), Sign(), PowerSGD(rank=1))]
    for compressor in (*feedback, Int8(), tacit.QSGD(bits=4)):
        trained(tacit.Strategy(subject="delta", rounds=Every(2), compressor=compressor, merge=Average()), 3)
    trained("sparseloco:sync_every=2,k=2,chunk=16", 3)
    trained("dilocox:sync_every=2,rank=1", 5)
    trained("predictive:sync_every=2", 3)
    trained("sgp", 3)
    trained("lowbit:bits=3,sync_every=2", 3)


@check
def an_evaluation_keeps_no_old_parameters() -> None:
    """Behind a forward without backward, FSDP2's root holds whole parameters, and would use them again."""
    found = []
    for evaluates in (False, True):
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "localsgd:sync_every=50", mesh=mesh()) as session:
            train(net, optimizer, range(2))
            if evaluates:
                with torch.no_grad():
                    net(batch(0, 0))
            session.sync()
            assert same_on_all_ranks(whole(net))
            train(net, optimizer, range(2, 4))
        found.append(whole(net))
    assert torch.equal(*found)


@check
def shards_that_are_written_are_told_apart_from_training() -> None:
    def written(syncs: bool) -> None:
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, "diloco:sync_every=50", mesh=mesh()) as session:
            train(net, optimizer, range(2))
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(2.0)
            if syncs:
                session.sync()
            train(net, optimizer, range(2, 5))

    written(syncs=True)
    raises(AttachError, lambda: written(syncs=False), "call session.sync() right after that")


@check
def statistics_are_averaged_along_the_far_axis() -> None:
    net = sharded(norm=True)
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, "localsgd:sync_every=2", mesh=mesh()):
        train(net, optimizer, range(3))
    seen = [torch.empty(41) for _ in range(4)]
    dist.all_gather(seen, net.norm.running_mean)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])  # as in FSDP2 itself


# ---- checkpoints --------------------------------------------------------------------------------------

LATE = tacit.Strategy(
    subject="delta",
    rounds=Every(4, fragments=2),
    compressor=tacit.ErrorFeedback(tacit.TopK(ratio=0.1, values=tacit.QSGD(bits=4))),
    overlap=Delayed(2),
    merge=OuterStep(0.7, 0.9, local=0.5),
)
"""Of which all there is is kept: rounds under way, residuals, momentum, random draws."""
OWING = tacit.Strategy(
    subject="delta", rounds=Every(2), compressor=tacit.ErrorFeedback(tacit.TopK(ratio=0.1)), merge=Average()
)


def folder() -> Path:
    """One folder for all ranks."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(str(name[0]))


@check
def resumed_is_straight() -> None:
    net = sharded(norm=True)
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, LATE, mesh=mesh()) as session:
        train(net, optimizer, range(5))
        assert session.levels[0].progress.under_way  # type: ignore[union-attr]
        files = [io.BytesIO() for _ in range(3)]
        for file, each in zip(files, (net, optimizer, session), strict=True):
            torch.save(each.state_dict(), file)
        at = folder()
        dcp.save({"session": session}, checkpoint_id=at)
        train(net, optimizer, range(5, 8))
    for how in ("files", "dcp"):
        again = sharded(norm=True)
        other = sgd(again)
        with tacit.attach(again, other, LATE, mesh=mesh()) as session:
            for file, each in zip(files, (again, other, session if how == "files" else None), strict=True):
                file.seek(0)
                if each is not None:
                    each.load_state_dict(torch.load(file, weights_only=False))
            if how == "dcp":
                dcp.load({"session": session}, checkpoint_id=at)
            train(again, other, range(5, 8))
        assert torch.equal(whole(again), whole(net)), how


@check
def distributed_checkpoints_keep_what_is_each_replicas_own() -> None:
    for algorithm, kind in SHARDED.items():

        def begin(
            make: Callable[[nn.Module], torch.optim.Optimizer], algorithm: str = algorithm
        ) -> tuple[nn.Module, torch.optim.Optimizer, tacit.Attached]:
            net = sharded(norm=True)
            optimizer = make(net)
            return net, optimizer, tacit.attach(net, optimizer, algorithm, mesh=mesh())

        assert goes_on(begin, train, kind), algorithm


def told(session: tacit.Attached, near: dist.ProcessGroup) -> dict[str, Tensor]:
    """What follows a parameter, put together; a rank whose shard is empty says nothing of it."""
    state = session.state_dict()
    mine = {key: value.to_local() for key, value in state.items() if hasattr(value, "to_local")}
    every: list[Any] = [None] * near.size()
    dist.all_gather_object(every, mine, near)
    keys = dict.fromkeys(key for each in every for key in each)
    return {key: torch.cat([each[key] for each in every if key in each]) for key in keys}


@check
def another_layout_goes_on() -> None:
    """Saved on 2x2, loaded on 2x1, where each replica has its own again, and on 4x1: the mean of the two."""
    strategy = "diloco:sync_every=3,bits=4"
    at, net = folder(), sharded()
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, strategy, mesh=mesh()) as session:
        train(net, optimizer, range(5))
        dcp.save({"session": session}, checkpoint_id=at)
        each: list[Any] = [None] * 4
        dist.all_gather_object(each, told(session, mesh().get_group("near")))
    before = each[0] | each[2]
    own = {key for key in before if key.startswith("rank")}
    assert {key.rpartition("/")[2] for key in before.keys() - own} == {"anchor", "merge.momentum"}
    assert {key.rpartition("/")[2] for key in own} == {"own", "own.0.momentum_buffer"}
    pair = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=AXES, _init_backend=True)
    two = dist.new_group([0, 1])
    for on, group in ((mesh(4, 1), None), (pair, two)):
        if dist.get_rank() not in on.mesh.flatten().tolist():
            continue
        again = sharded(on)
        other = sgd(again)
        with tacit.attach(again, other, strategy, mesh=on) as session:
            if on is pair:
                load = partial(dcp.load, {"session": session}, checkpoint_id=at, process_group=group)
                raises(CheckpointError, load, "/own.0.momentum_buffer', and it was not read: call get_state_")
            get_optimizer_state_dict(again, other)
            if on is pair:
                load()
            else:
                file = at / f"{dist.get_rank()}.pt"
                dcp_to_torch_save(at, file)
                session.load_state_dict(torch.load(file)["session"])
            after = told(session, on.get_group("near"))
            for key, value in after.items():
                owners = (
                    [key]
                    if on is pair or not key.startswith("rank")
                    else [f"rank{i}{key[5:]}" for i in (0, 1)]
                )
                assert torch.equal(value, torch.stack([before[each] for each in owners]).mean(0)), key
            assert session.metrics()["rounds"] == 0
            assert session.session.step == 5
            train(again, other, range(5, 8))
    dist.barrier()


@check
def residuals_stay_with_their_shards() -> None:
    """They are each replica's own, sharded; a checkpoint that was not of shards has none of them."""
    net = sharded()
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, OWING, mesh=mesh()) as session:
        train(net, optimizer, range(3))
        state = session.state_dict()
        owed = {
            key: x for key, x in told(session, mesh().get_group("near")).items() if key.endswith("/residual")
        }
        replica = dist.get_rank() // 2
        shapes = {"first": (3, 20), "second": (41, 3), "last": (1, 41)}
        assert {key: tuple(x.shape) for key, x in owed.items()} == {
            f"rank{replica}/0/{layer}.weight/residual": shape for layer, shape in shapes.items()
        }
        assert all(bool(x.any()) for x in owed.values())
        says = "these are states of a sharded model"
        raises(CheckpointError, lambda: tacit.join_states([state, state]), says)
        plain = {key: value for key, value in state.items() if key != "shards"}
        raises(CheckpointError, lambda: session.load_state_dict(plain), "a model that was not sharded")


# ---- what is refused ----------------------------------------------------------------------------------


@check
def what_cannot_be_is_refused_by_name() -> None:
    def refused(says: str, algorithm: Any = "diloco", **options: Any) -> None:
        net = options.pop("net", None) or sharded()
        optimizer = options.pop("optimizer", None) or sgd(net)
        given = {"mesh": mesh(), **options}
        raises(AttachError, lambda: tacit.attach(net, optimizer, algorithm, **given), says)

    refused(
        "'snoo' averages the gradients of all ranks, and FSDP2 averages those of one replica alone", "snoo"
    )
    refused("attach 'localsgd', which averages parameters from the first step on, or 'lowbit'", "postlocal")
    refused("'ps-async' uses parameter servers", "ps-async")
    refused(
        "leave compressors and periods of the near level out", "daso:local=2", epochs=2, steps_per_epoch=4
    )
    by_node = tacit.Strategy(subject="delta", merge=Average(), rounds=Every(4), topology=tacit.Hierarchical())
    refused("and topology=Flat() in Python", by_node)
    drifting = tacit.Strategy(subject="delta", merge=Average(), rounds=ByVariance(4))
    refused("write rounds=Every(16)", drifting)
    refused("scaler= is not supported", scaler=torch.amp.GradScaler("cpu"))
    refused("weight=2.0 is not supported", "localsgd", weight=2.0)
    refused("nothing says which other ranks have the same shards", mesh=None)
    refused("is no DeviceMesh", mesh=(2, 2))
    refused("the model is sharded on all axes of the mesh (2,)", mesh=mesh()["near"])
    refused("which are not all axes but one of the mesh", mesh=mesh(4, 1))
    refused("which have other shards", mesh=None, group=mesh().get_group("near"))
    hybrid = Net()
    fully_shard(hybrid, mesh=mesh())
    refused("sharded and replicated, on a mesh of 2 axes (HSDP)", net=hybrid)
    partly = Net()
    fully_shard(partly.first, mesh=mesh()["near"])
    refused("second.weight is trained and not sharded", net=partly)
    apart = Net()
    fully_shard(apart.first, mesh=mesh()["far"])
    fully_shard(apart, mesh=mesh()["near"])
    refused("is sharded on another mesh than", net=apart)
    early = Net()
    optimizer = sgd(early)
    fully_shard(early, mesh=mesh()["near"])
    refused("after fully_shard where that is called", net=early, optimizer=optimizer)
    older = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    refused("is a FullyShardedDataParallel (FSDP1), and only FSDP2 is supported", net=older)
    plain = DDP(Net())
    refused("group= is for sharded models", net=plain, group=mesh().get_group("far"))
    net = sharded()
    with tacit.attach(net, sgd(net), "diloco", mesh=mesh()):
        refused("'diloco' is attached to this model already", net=net)


@check
def ranks_of_a_replica_attach_the_same() -> None:
    net = sharded()
    rank = dist.get_rank()
    own = "diloco" if rank % 2 else "localsgd"
    says = f"ranks [{rank // 2 * 2 + 1}] attach another strategy than rank {rank // 2 * 2}: "
    raises(AttachError, lambda: tacit.attach(net, sgd(net), own, mesh=mesh()), says)


if __name__ == "__main__":
    CHECKS.run()
