"""What a step launches on a GPU, and in which order: the same on every rank, whatever its data.

Each rank is this process, in a world of fakes whose collectives give back what they are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from rank_training import network, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_flatten

import tacit
from in_stream import IN_STREAM
from tacit.api.attached import Attached
from tacit.attaching.failures import Failures
from tacit.contracts import Collective
from tacit.errors import NonFinite
from tacit.exchange.lane import Job
from tacit.exchange.stream_lane import StreamLane
from tacit.kernels.dispatch import emulated_device
from tacit.transports import process_groups
from tacit.transports.by_device import ByDevice
from tacit.transports.torch_distributed import TorchTransport

WORLD = 4
STEPS = 5
"""In the fourth round buckets settle on DDP's buckets."""
BY_NODE = tacit.Strategy(
    compressor=tacit.ErrorFeedback(tacit.TopK(ratio=0.1)), topology=tacit.Hierarchical(), name="by node"
)
STRATEGIES = {
    "dense": "dense",
    "topk": "topk:ratio=0.1",
    "dgc": "dgc:ratio=0.1",
    "powersgd": "powersgd",
    "efsign": "efsign",
    "qsgd": "qsgd",
    "int8": "int8",
    "gtopk": "gtopk:ratio=0.1",
    "threshold": "threshold:tau=0.001,capacity=0.1",
    "uneven": "uneven:rates=1000/1000/1000/100",
    "late": "pipesgd",
    "gossip": "gossip:graph=ring",
    "choco": "choco",
    "groups": "wagma:global_every=2",
    "by node": BY_NODE,
    "diloco": "diloco:sync_every=2,bits=4",
    "lowbit": "lowbit:sync_every=2",
    "streaming": "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1,bits=4",
    "lag": "lag:xi=0",  # all gradients are new, as each rank takes the others' flags to be its own
    "laq": "laq:xi=0",
    "lengths": "lowbit:sync_every=2,entropy=true",
    "lengths of gradients": "int8:entropy=true",
}
OF_NODES = ("daso", "ednncomm")
"""Here each rank finds all others on its node."""
EVERY = STRATEGIES | {
    text: text for text in IN_STREAM if text.partition(":")[0] not in ("ddp", *OF_NODES, *STRATEGIES)
}
MIXING = ("gossip", "choco", "groups")
LATER = ("diloco", "lowbit", "lengths", "streaming", "late", "lag", "laq")
ASKS = ("lag", "laq", "lengths", "lengths of gradients")
GRADIENTS = [name for name in STRATEGIES if name not in (*LATER, *MIXING)]

Launch = tuple[Any, ...]


class Rank:
    """What one rank has launched.

    Attributes:
        launched: each message: its kind, axis and sizes, and the group on which it left.
        asked: the buckets, as they were given to the lane.
        keys: of each message, the bucket; each bucket once, however often it speaks.
    """

    def __init__(self, session: Attached, optimizer: torch.optim.Optimizer) -> None:
        self.session, self.optimizer = session, optimizer
        self.launched: list[Launch] = []
        self.asked: list[str] = []
        self.keys: list[str] = []

    @property
    def device(self) -> TorchTransport:
        found = self.session.levels[0].transport
        assert isinstance(found, ByDevice)
        return found.device


def sizes(request: Collective) -> list[tuple[int, str]]:
    """Of the tensors that a message is made of."""
    parts = [getattr(request, each.name) for each in fields(request) if each.name != "finite_probe"]
    flat = tree_flatten(parts)[0]
    return [(x.numel(), str(x.dtype)) for x in flat if isinstance(x, Tensor)]


@contextmanager
def rank(place: int, strategy: str | tacit.Strategy) -> Iterator[tuple[DDP, Rank]]:
    """Be this rank of a fake world of two nodes."""
    post, submit = TorchTransport.post, StreamLane.submit
    found: list[Rank] = []

    def posting(self: TorchTransport, request: Collective, stage: int, key: str) -> Any:
        if found and self is found[0].device:
            axis, kind = request.axis, type(request).__name__
            found[0].launched.append((kind, axis, *sizes(request)))
            found[0].keys += [key] * (found[0].keys[-1:] != [key])
        return post(self, request, stage, key)

    def submitting(self: StreamLane, job: Job) -> None:
        if found:
            found[0].asked.append(job.key)
        submit(self, job)

    with ExitStack() as entered:
        dist.init_process_group("fake", store=dist.HashStore(), rank=place, world_size=WORLD)
        entered.callback(dist.destroy_process_group)
        patch = entered.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Failures, "watch", lambda *_: None)  # nobody else is there
        patch.setattr(process_groups, "own_groups", fake_groups)
        patch.setattr(dist, "all_to_all_single", echoed)
        patch.setattr(process_groups, "all_gather_flat", gathered)
        patch.setattr(dist, "batch_isend_irecv", swapped)
        patch.setattr(TorchTransport, "post", posting)
        patch.setattr(StreamLane, "submit", submitting)
        entered.enter_context(emulated_device())
        model = DDP(network(), bucket_cap_mb=0.2, gradient_as_bucket_view=True)
        mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("net", "node")) if strategy is BY_NODE else None
        )
        by_adam = strategy in ("onebit-adam", "zeroone-adam")
        optimizer = torch.optim.AdamW(model.parameters()) if by_adam else sgd(model)
        patch.setenv("GROUP_RANK", str(place // 2))
        given: Any = {"mesh": mesh, "timeout": timedelta(seconds=30), "steps_per_epoch": 3, "epochs": 2}
        session = tacit.attach(model, optimizer, strategy, **given)
        entered.callback(session._leave)
        found.append(Rank(session, optimizer))
        yield model, found[0]


def fake_groups(
    parent: Any, places: Any, timeout: Any, backend: str, use: tuple[int, str], count: int, connections: int
) -> list[dist.ProcessGroup]:
    return [dist.new_group(list(places), timeout, "fake") for _ in range(count)]


def echoed(
    out: Tensor, x: Tensor, outs: Any, ins: Any, group: dist.ProcessGroup, async_op: bool = False
) -> None:
    """Everybody gives what this rank gives to itself; of another length, zeros."""
    mine = torch.split(x, ins)[group.rank()]
    for part in torch.split(out, outs):
        part.copy_(mine) if part.shape == mine.shape else part.zero_()


def gathered(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
    """Everybody gives what this rank gives."""
    out.view(-1, x.numel()).copy_(x.clone().view(1, -1))


def swapped(batch: list[dist.P2POp]) -> list[dist.Work]:
    """Everybody gives what this rank gives; where it gives nothing, zeros."""
    given = [each.tensor for each in batch if each.op is dist.isend]
    for i, each in enumerate(op.tensor for op in batch if op.op is dist.irecv):
        each.copy_(given[i]) if given else each.zero_()
    return []


def backward(
    model: DDP, step: int, place: int, change: Callable[[Tensor], Tensor] = torch.Tensor.clone
) -> None:
    data = torch.Generator().manual_seed(100 * step + place)
    x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)
    model.zero_grad()
    handle = model.module[2].weight.register_hook(change)
    nn.functional.cross_entropy(model(x), y).backward()
    handle.remove()


def trained(
    place: int, strategy: str | tacit.Strategy, change: Callable[[Tensor], Tensor] = torch.Tensor.clone
) -> Rank:
    """What this rank launches in a few steps; `change`: of a gradient, in the last step."""
    with rank(place, strategy) as (model, seen):
        for step in range(STEPS - 1):
            seen.session.observe(torch.tensor(1.0))
            backward(model, step, place)
            seen.optimizer.step()
        seen.session.observe(torch.tensor(1.0))
        backward(model, STEPS, place, change)
        if change is late_and_broken:
            with pytest.raises(NonFinite, match=r"2\.weight"):
                seen.optimizer.step()
        return seen


def late_and_broken(g: Tensor) -> Tensor:
    time.sleep(0.05)
    return g * float("nan")


@pytest.mark.parametrize("name", EVERY)
def test_every_rank_launches_the_same(name: str) -> None:
    """Whatever its values are, and however late it is; by node, those with the same place in their nodes."""
    first = trained(0, EVERY[name])
    second = trained(2, EVERY[name], late_and_broken if name in GRADIENTS else torch.Tensor.clone)
    # Of spans that differ, and of lengths where each takes the others' to be its own.
    told = slice(2 if name.startswith(("uneven", "lengths", "three-lc")) else None)
    assert [each[told] for each in first.launched] == [each[told] for each in second.launched]
    assert first.launched
    assert first.keys == second.keys


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ASKS])
def test_messages_leave_in_the_order_of_the_calls_on_one_group_an_axis(name: str) -> None:
    with rank(0, STRATEGIES[name]) as (model, seen):
        for step in range(STEPS):
            backward(model, step, 0)
            seen.optimizer.step()
        groups = seen.device._groups
        assert {stage for _, stage in groups} == {0}
        axes = {launch[1] for launch in seen.launched}
        assert {axis for axis, _ in groups} >= axes
        assert len({id(group) for group in groups.values()}) == len(groups)
        one_shot = [key for key in seen.keys if key != "alone"]  # state that follows its buckets
        assert one_shot == [key for i, key in enumerate(seen.asked) if seen.asked[i - 1 : i] != [key]]
        assert len(set(seen.asked)) > 1, "there are several buckets"
