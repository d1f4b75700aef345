"""What members cannot do is refused by name, before a store is asked."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.errors import AttachError, ConfigError


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(4, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("auto", "'auto' does not choose for members that come and go"),
        ("ddp", "'ddp' is not for members that come and go"),
        ("fusion", "'fusion' is not for members that come and go"),
        ("pipesgd", "'pipesgd' is not for members that come and go"),
        ("adpsgd", "'adpsgd' is not for members that come and go"),
        ("ps-async", "'ps-async' is not for members that come and go"),
        ("daso", "'daso' is not for members that come and go"),
        ("dgc", "'dgc' takes the optimizer's momentum over"),
    ],
)
def test_an_algorithm(model: DistributedDataParallel, algorithm: str, says: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(AttachError, match=says):
        tacit.attach(model, optimizer, algorithm, members=tacit.Members(store="127.0.0.1:1"))


@pytest.mark.parametrize("algorithm", ["dgc", "onebit-adam:freeze_step=5"])
def test_momentum_that_is_taken_over_is_refused_whatever_the_optimizer(
    model: DistributedDataParallel, algorithm: str
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"takes the optimizer's momentum over.*attach 'topk', 'powersgd'"):
        tacit.attach(model, optimizer, algorithm, members=tacit.Members(store="127.0.0.1:1"))


def test_members_that_were_not_asked_for(model: DistributedDataParallel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        tacit.attach(model, optimizer, "lowbit") as session,
        pytest.raises(AttributeError, match=r"write tacit\.attach\(\.\.\., members=tacit\.Members\(\)\)"),
    ):
        _ = session.members


def test_gradients_that_are_unscaled_behind_their_exchange(model: DistributedDataParallel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    members = tacit.Members(store="127.0.0.1:1")
    with pytest.raises(AttachError, match=r"a fused SGD unscales them in it.*fused=False"):
        tacit.attach(model, optimizer, "dense", scaler=scaler, members=members)


def test_no_store(model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACIT_MEMBERS", raising=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"start one by python -m tacit\.members\.store --port 29400"):
        tacit.attach(model, optimizer, "lowbit", members=tacit.Members())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"min": 0}, "members: min=0 is not a whole number"),
        ({"min": 3, "max": 2}, "members: max=2 is not a whole number"),
        ({"store": "a:1", "hub": "b:1"}, "members: store and hub exclude each other: write one of them"),
        ({"silence": 0.1}, r"members: silence=0\.1 is no number of seconds from 1 up"),
        ({"patience": float("nan")}, "members: patience=nan is no number of seconds"),
        ({"quorum": 65}, "members: quorum=65 is not a whole number"),
        ({"store": "here"}, "members: store='here' is no host:port"),
    ],
)
def test_numbers(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tacit.Members(**given).address()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "more", "says"),
    [
        ("dense", {}, "'dense' is not for members that FSDP2 shards: attach one whose replicas step alone"),
        ("adacomm", {}, "'adacomm' is not for members that FSDP2 shards"),
        ("lowbit", {"mesh": 1}, "members= has them find each other: leave mesh= and group= out"),
    ],
)
def test_what_sharded_replicas_cannot_do(
    model: DistributedDataParallel, algorithm: str, more: dict[str, int], says: str
) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    given = {name: init_device_mesh("cpu", (size,)) for name, size in more.items()}
    with pytest.raises(AttachError, match=says):
        tacit.attach(sharded, optimizer, algorithm, members=tacit.Members(store="127.0.0.1:1"), **given)


def test_a_quorum_of_sharded_replicas(model: DistributedDataParallel) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    with pytest.raises(AttachError, match="quorum=2 is not for members that FSDP2 shards"):
        tacit.attach(sharded, optimizer, "lowbit", members=tacit.Members(store="127.0.0.1:1", quorum=2))
