"""What a user who profiles a step sees of tacit."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import tacit
from tacit import ranges


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seen(algorithm: str, *, threads: bool) -> set[str]:
    """The names of tacit's ranges in two steps; those of its own thread only if all threads are profiled."""
    model = DistributedDataParallel(nn.Linear(100, 100), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=threads)
    with (
        tacit.attach(model, optimizer, algorithm),
        profile(activities=[ProfilerActivity.CPU], experimental_config=config) as told,
    ):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 100)).sum().backward()
            optimizer.step()
    return {event.key for event in told.key_averages() if event.key.startswith("tacit::")}


@pytest.mark.usefixtures("alone")
def test_the_phases_of_a_gradient_exchange() -> None:
    phases = {"start", "resume", "post_allgather_world", "wait"}
    assert seen("topk", threads=True) == {f"tacit::topk::{phase}" for phase in phases}
    assert seen("topk", threads=False) == {"tacit::topk::wait"}


@pytest.mark.usefixtures("alone")
def test_an_exchange_in_the_training_thread_needs_no_other_threads() -> None:
    assert {"tacit::dense::start", "tacit::dense::post_allreduce_world"} <= seen("dense", threads=False)


@pytest.mark.usefixtures("alone")
def test_a_round_after_the_step_is_one_range() -> None:
    assert seen("localsgd:sync_every=1", threads=False) >= {"tacit::localsgd::sync"}


def test_without_a_profiler_nothing_is_made() -> None:
    assert ranges.within("topk", "wait") is ranges.within("dense", "start")
