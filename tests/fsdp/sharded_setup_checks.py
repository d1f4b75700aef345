"""What scripts do with models that FSDP2 shards, in one launch with `sharded_gradient_checks`."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_training import close_to, raises
from sharded_checks import Net, batch, check, mesh, sgd, sharded, train, whole
from sharded_gradient_checks import CHECKS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tacit
from tacit.errors import NonFinite

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
    for algorithm in ALGORITHMS:
        expected = led(sharded(), algorithm)
        net = Net()
        for layer in (net.first, net.second):
            layer.compile(backend="aot_eager")
        close_to(led(layered(net), algorithm), expected)
        torch._dynamo.reset()
        outside: Any = sharded()
        optimizer = sgd(outside)
        compiled: Any = torch.compile(outside, backend="aot_eager")
        with tacit.attach(compiled, optimizer, algorithm, mesh=mesh()):
            train(compiled, optimizer, range(5))
        close_to(whole(outside), expected)
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


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:])
