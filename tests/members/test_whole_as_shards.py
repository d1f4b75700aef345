"""A replica of one process that takes part as the shards into which FSDP2 cuts others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.api.members import MemberSession
from tacit.checkpoint import carried
from tacit.errors import AttachError, ConfigError
from tacit.model.trained_model import local
from tacit.transports.member_links import served

SHARDS = 4


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trained:
    """A model of which the last shards have fewer rows, or none."""

    def __init__(self, shards: int, algorithm: str = "localsgd:sync_every=2", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._store = served("127.0.0.1", 0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        members = tacit.Members(store=f"127.0.0.1:{self._store.port}", shards=shards)
        session = tacit.attach(self.model, self.optimizer, algorithm, members=members)
        assert isinstance(session, MemberSession)
        self.session = session

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.loss()
            self.optimizer.step()

    def parts(self) -> list[Any]:
        return self.session.members._shards

    def tensors(self) -> list[Tensor]:
        moments = [each["exp_avg_sq"] for each in self.optimizer.state.values()]
        return [x.detach() for x in (*self.model.parameters(), *moments)]


def test_alone_it_trains_as_one_that_is_whole(world: None) -> None:
    found = []
    for shards in (1, SHARDS):
        trained = Trained(shards, "diloco:sync_every=2")
        with trained.session as session:
            trained.train(3)
            trained.optimizer.step(trained.loss)  # type: ignore[arg-type]
            trained.optimizer.param_groups[0]["lr"] = 0.0  # as a warm-up may begin
            trained.train(2)
            assert (session.step, session.metrics()["rounds"]) == (6, 3)
            assert session.active_path.count(f"as {SHARDS} shards") == (shards > 1)
        found.append(trained.tensors())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_its_shards_are_those_of_fsdp2_and_share_its_memory(world: None) -> None:
    trained = Trained(SHARDS)
    with trained.session:
        shards = [each.spec.optimizers[0] for each in trained.parts()]
        assert not any(each.state.get(p) for each in shards for p in each.param_groups[0]["params"])
        assert not trained.optimizer.state
        trained.train(1)
        params = dict(trained.model.module.named_parameters())
        for part in trained.parts():
            for name, p in params.items():
                shard, rows = part.spec.named[name], p.detach().chunk(SHARDS)
                mine = rows[part.number] if part.number < len(rows) else p.detach()[:0]
                assert shard.shape == p.shape
                assert torch.equal(local(shard), mine)
                of = part.spec.optimizers[0].state[shard]["exp_avg"]
                for view, whole in ((shard, p), (of, trained.optimizer.state[p]["exp_avg"])):
                    assert local(view).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_hooks_before_a_step_see_rows_of_the_gradient_and_change_rows_of_the_state(world: None) -> None:
    """As the policy for Adam's variance does."""
    trained = Trained(SHARDS)
    with trained.session:
        trained.train(1)
        p, part = trained.model.module[0].weight, trained.parts()[1]
        before, shard = trained.optimizer.state[p]["exp_avg_sq"].clone(), part.spec.named["0.weight"]

        def change(optimizer: Any, *_: Any) -> None:
            assert isinstance(optimizer, torch.optim.AdamW)
            assert torch.equal(local(shard.grad), p.grad[3:6])
            local(optimizer.state[shard]["exp_avg_sq"]).zero_()

        handle = part.spec.optimizers[0].register_step_pre_hook(change)
        trained.loss()
        trained.optimizer.step()
        handle.remove()
        assert shard.grad is None
        after = trained.optimizer.state[p]["exp_avg_sq"]
        assert p.grad is not None
        expected = torch.cat([before[:3], torch.zeros(3, 8), before[6:]]) * 0.999 + p.grad.square() * 0.001
        torch.testing.assert_close(after, expected)
    assert not trained.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert not trained.optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]


def test_each_shards_state_goes_to_another_member_by_itself(world: None) -> None:
    first = Trained(SHARDS)
    with first.session:
        first.train(4)
        expected, messages = [x.clone() for x in first.tensors()], []
        for part in first.parts():
            kept = carried.present(part.now.spec, part.levels)
            messages.append(carried.with_replica(kept, part.now.spec, part.levels, newcomer=True).to_bytes())
    second = Trained(SHARDS, seed=1)
    with second.session:
        for part, message in zip(second.parts(), messages, strict=True):
            found = carried.CarriedState.of_bytes(message)
            carried.take(found, part.now.spec, part.levels, 4, unacted=False, own=False)
            assert second.parts()[part.number].levels[0].session.step == 4
            sizes = [x.untyped_storage().nbytes() for of in found.optimizers for x in of[0].values()]
            assert max(sizes) == (48 if part.number < 3 else 4)  # 3 rows of 8 entries in bf16; its step alone
        params = len([*second.model.parameters()])
        for i, (a, b) in enumerate(zip(expected, second.tensors(), strict=True)):
            torch.testing.assert_close(a, b, rtol=0.0 if i < params else 0.01, atol=0.0)  # moments in bf16


@pytest.mark.parametrize(
    ("layer", "algorithm", "more", "says"),
    [
        (nn.BatchNorm1d(8), "lowbit", {}, "1 keeps running statistics, of which each rank .* use LayerNorm"),
        (nn.Tanh(), "dense", {}, "'dense' is not for members that FSDP2 shards"),
        (nn.Tanh(), "lowbit", {"quorum": 2}, "quorum=2 is not for members that FSDP2 shards"),
    ],
)
def test_what_it_cannot_do(
    world: None, layer: nn.Module, algorithm: str, more: dict[str, int], says: str
) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), layer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    members = tacit.Members(store="127.0.0.1:1", shards=SHARDS, **more)  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=says):
        tacit.attach(model, optimizer, algorithm, members=members)


def test_a_sharded_replica_has_as_many_shards_as_ranks(world: None) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    members = tacit.Members(store="127.0.0.1:1", shards=SHARDS)
    with pytest.raises(AttachError, match=r"and 1 ranks share this one: leave it out"):
        tacit.attach(sharded, optimizer, "lowbit", members=members)
    with pytest.raises(ConfigError, match="members: shards=0 is not a whole number"):
        tacit.Members(shards=0)


def test_a_parameter_that_has_moved_is_refused(world: None) -> None:
    trained = Trained(SHARDS)
    with trained.session:
        trained.loss()
        p = trained.model.module[0].weight
        p.data = p.data.clone()
        with pytest.raises(AttachError, match="lies elsewhere in memory than when the session began"):
            trained.optimizer.step()
