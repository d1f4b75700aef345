"""What scripts do with models that FSDP2 shards, in one launch with `sharded_gradient_checks`."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_training import close_to, raises, same_on_all_ranks
from sharded_checks import Net, batch, check, mesh, sgd, sharded, train, whole
from sharded_gradient_checks import CHECKS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tacit
from tacit.errors import AttachError, NonFinite
from tacit.model.trained_model import local

ALGORITHMS = ("dense", "topk:ratio=0.2", "diloco:sync_every=2,bits=8")
"""Gradients that are averaged, gradients of which some is owed, and progress."""


class Recomputed(Net):
    """Its layers' activations are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        def again(layer: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(layer, x, use_reentrant=False)
            return found

        return again(self.last, again(self.second, again(self.first, x).relu()).relu())


def layered(net: Net) -> Any:
    """Sharded as `sharded` does it."""
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh()["near"])
    return fully_shard(net, mesh=mesh()["near"])


def led(net: Any, algorithm: str) -> Tensor:
    """Where training leads."""
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, algorithm, mesh=mesh()):
        train(net, optimizer, range(5))
    return whole(net)


@check
def activations_that_are_recomputed_change_nothing() -> None:
    for algorithm in ALGORITHMS:
        found = led(layered(Recomputed()), algorithm)
        assert torch.equal(found, led(layered(Net()), algorithm)), algorithm


@check
def a_whole_forward_that_is_recomputed_changes_nothing() -> None:
    for algorithm in ALGORITHMS:
        net = sharded()
        optimizer = sgd(net)
        with tacit.attach(net, optimizer, algorithm, mesh=mesh()):
            for step in range(5):
                x = batch(step, dist.get_rank())
                optimizer.zero_grad()
                y: Any = checkpoint(net, x, use_reentrant=False)
                (y - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
        assert torch.equal(whole(net), led(sharded(), algorithm)), algorithm


@check
def compiled_layers_train_as_others_do() -> None:
    """Each compiled before it is sharded, as torchtitan does it; and the whole behind that."""
    _, sparse, progress = ALGORITHMS
    for algorithm in (sparse, progress):
        net = Net()
        for layer in (net.first, net.second):
            layer.compile(backend="aot_eager")
        close_to(led(layered(net), algorithm), led(sharded(), algorithm))
        torch._dynamo.reset()
    outside: Any = sharded()
    optimizer = sgd(outside)
    compiled: Any = torch.compile(outside, backend="aot_eager")
    with tacit.attach(compiled, optimizer, sparse, mesh=mesh()):
        train(compiled, optimizer, range(5))
    close_to(whole(outside), led(sharded(), sparse))
    torch._dynamo.reset()


@check
def a_nan_is_an_error_that_names_the_rank_as_all_know_it() -> None:
    """Rank 3's loss is one: its replica's gradients are, on ranks 2 and 3, which ranks 0 and 1 hear of."""
    rank, near = dist.get_rank(), mesh().get_group("near")
    for algorithm in (*ALGORITHMS, "localsgd:sync_every=1", "bf16", "efsign", "lowbit"):
        net = sharded()
        optimizer = sgd(net)
        session = tacit.attach(net, optimizer, algorithm, mesh=mesh())
        train(net, optimizer, range(2))

        def step(net: Any = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(2):  # the second is that of a period of two
                optimizer.zero_grad()
                loss = net(batch(2, rank)).square().mean()
                (loss * float("nan") if rank == 3 else loss).backward()
                optimizer.step()

        raises(NonFinite, step, f"on rank {2 + dist.get_rank(near)}, in step ")
        dist.barrier()
        session.close()


@check
def a_rank_with_more_process_groups_than_others_finds_them() -> None:
    """Ranks 0 and 1 have one each that the others have not; another time-out asks for groups that are new."""
    if dist.get_rank() < 2:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    net = sharded()
    optimizer = sgd(net)
    with tacit.attach(net, optimizer, "topk:ratio=0.2", mesh=mesh(), timeout=timedelta(seconds=77)):
        train(net, optimizer, range(2))
    dist.barrier()


# ---- in few bits inside a replica -----------------------------------------------------------------------


def wide(on: Any = None) -> Any:
    """Shards of 151 x 20 + 151, 4 x 301 + 4 and 1 x 7 + 1 entries, of which the last are too few."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 301), nn.ReLU(), nn.Linear(301, 7), nn.ReLU(), nn.Linear(7, 1))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=on or mesh()["near"])
    return net


def message(matrix: int, vector: int, unit: int) -> int:
    """The bytes of a shard in 8 bits."""
    return -(-matrix // 512) * (512 + unit) + 4 * vector


@check
def all_ranks_of_a_replica_compute_with_the_same_weights_of_few_bits() -> None:
    net, plain = wide(), wide()
    x = batch(0, 0)
    with tacit.quantize_shards(net, weights=8, gradients=None) as near:
        found = net(x)
        assert near.sent == message(3020, 151, 2) + message(1204, 4, 2) + 4 * 8
        assert near.whole == 4 * (3171 + 1208 + 8)
    pair = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(pair, found.detach(), group=mesh().get_group("near"))
    assert torch.equal(*pair)
    assert 0 < float((found - plain(x)).detach().abs().max()) < 0.05
    assert torch.equal(net(x), plain(x)), "closed, it is FSDP2's"


@check
def gradients_of_few_bits_are_near_those_of_many() -> None:
    for feedback in (False, True):
        net, plain = wide(), wide()
        near = tacit.quantize_shards(net, weights=None, gradients=8, feedback=feedback)
        for each in (net, plain):
            train(each, torch.optim.SGD(each.parameters(), lr=1e-30), [0])
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            mine, theirs = local(p.grad), local(q.grad)
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
            if p.ndim < 2:
                torch.testing.assert_close(mine, theirs, msg=f"{name} travels as it is")
        unit = 2 if feedback else 4
        assert near.sent == message(3020, 151, unit) + message(1204, 4, unit) + 4 * 8
        assert near.whole == 4 * (3171 + 1208 + 8)
        assert near.owed_bytes == (2 * (6 + 3) * (512 + 4) if feedback else 0)
        near.close()
        near.close()


@check
def replicas_of_few_bits_stay_equal_and_near() -> None:
    def led_by(**bits: Any) -> Tensor:
        net = wide()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        near = tacit.quantize_shards(net, **bits) if bits else None
        with tacit.attach(net, optimizer, "dense", mesh=mesh()):
            train(net, optimizer, range(4))
        if near is not None:
            near.close()
        assert same_on_all_ranks(whole(net))
        return whole(net)

    plain = led_by()
    for bits in ({"weights": 8, "gradients": 8}, {"weights": None, "gradients": 4, "feedback": True}):
        away = float((led_by(**bits) - plain).abs().max())
        assert 0 < away < 0.05, (bits, away)


@check
def frozen_and_hybrid_modules_lead_where_they_should() -> None:
    net, plain = wide(), wide()
    for each in (net, plain):
        each[2].requires_grad_(False)
    with tacit.quantize_shards(net, weights=None, gradients=8):
        for each in (net, plain):
            train(each, torch.optim.SGD(each.parameters(), lr=1e-3), range(2))
        close_to(whole(net), whole(plain), 1e-3)
    hybrid = wide(mesh())
    with tacit.quantize_shards(hybrid, weights=None, gradients=8) as near:
        train(hybrid, torch.optim.SGD(hybrid.parameters(), lr=1e-3), range(2))
        assert near.sent < near.whole
    assert same_on_all_ranks(whole(hybrid))


@check
def a_model_whose_shards_are_quantized_is_not_taken_twice() -> None:
    net = wide()
    with tacit.quantize_shards(net):
        raises(AttachError, lambda: tacit.quantize_shards(net), "an earlier quantize_shards")
    tacit.quantize_shards(net).close()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:])
