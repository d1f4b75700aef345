"""Workers of one process: their trajectory is that of ranks."""

import pytest
import torch

from tacit.algorithms import parse
from tacit.kernels.dispatch import emulated_device
from tacit_lab.recipes.bytes import Bytes
from tacit_lab.recipes.digits import Digits
from tacit_lab.study.replicas import Crew, Replicas


def test_dense_replicas_are_one_model_with_the_mean_of_all_gradients() -> None:
    recipe = Digits()
    found = Replicas(recipe, parse("dense"), steps=3).train()
    model = recipe.model(0)
    optimizer = recipe.optimizer(model)
    first = [group["lr"] for group in optimizer.param_groups]
    streams = [recipe.train_batches(0, rank, 4, 0) for rank in range(4)]
    for step, batches in zip(range(3), zip(*streams, strict=True), strict=False):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * recipe.rate((step + 0.5) / 3)
        optimizer.zero_grad()
        for inputs, targets in batches:
            (recipe.loss(model(inputs), targets) / 4).backward()
        optimizer.step()
    for mine, theirs in zip(found.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    assert found.sent == found.plain + 4 * 3 * 8  # each sends the checksum of its parameters to the others


@pytest.mark.parametrize("algorithm", ["topk", "localsgd:sync_every=2", "dgc", "odsgd", "pipesgd"])
def test_replicas_end_equal(algorithm: str) -> None:
    replicas = Replicas(Digits(), parse(algorithm), steps=5)
    replicas.train()
    first, *others = ([*worker.net.parameters()] for worker in replicas._workers)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "algorithm",
    ["dense", "topk", "lowbit:sync_every=2", "zeroone-adam:freeze_step=2,refresh=1,gradient_bits=4"],
)
def test_in_stream_order_replicas_end_where_they_do_on_the_host(algorithm: str) -> None:
    """As on a GPU, with tensors on the CPU that are treated as its."""
    recipe = Bytes()
    expected = Replicas(recipe, parse(algorithm), steps=4).train()
    with emulated_device():
        replicas = Replicas(recipe, parse(algorithm), steps=4)
        found = replicas.train()
    assert all(level.session.context.in_stream for worker in replicas._workers for level in worker.levels)
    for mine, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert found.sent == pytest.approx(expected.sent, rel=1e-3)


def test_an_error_of_one_worker_is_raised() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1")

    crew = Crew(2)
    with pytest.raises(ValueError, match="rank 1"):
        crew.all(work)
    crew.close()
