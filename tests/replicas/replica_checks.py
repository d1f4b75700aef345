"""Replicas that move on their own, on real Gloo processes, 2 nodes of 2: their memory, buffers and rates."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_training import (
    Checks,
    close_to,
    everywhere,
    flat,
    network,
    raises,
    same_on_all_ranks,
    sgd,
    steps,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.compressors import ErrorFeedback, TopK
from tacit.errors import AttachError, NonFinite
from tacit.kernels import deltas
from tacit.kernels.dispatch import active_backend

CHECKS = Checks()
check = CHECKS.add


class Quiet(nn.Module):
    """Batches whose variance is 0.02, where a new BatchNorm believes in 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(0.14 * self.first(x) / self.first(x).std().detach()).relu())
        return y


def batch(step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's own."""
    g = torch.Generator().manual_seed(10_000 * seed + 100 * step + dist.get_rank())
    return torch.randn(16, 20, generator=g), torch.randint(0, 5, (16,), generator=g)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: tacit.Attached,
    steps: int,
    after: Callable[[int], None] = lambda step: None,
    first: int = 0,
) -> None:
    for step in range(first, first + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        session.observe(loss.detach())
        optimizer.step()
        after(step)


PROGRESS = (
    "localsgd:sync_every=4",
    "overlap-localsgd:sync_every=4",
    "streaming-diloco:sync_every=6,fragments=3,fragment_sync_delay=2",
    "easgd:sync_every=4",
    "predictive:sync_every=4",
    "mp2:rescale=false,sync_every=4,budget=0.5",
    "ednncomm:sync_every=4,fragments=2,fragment_sync_delay=1",
    "daso:warmup_epochs=1",
    "sgp",
    "gossip:late=1,sync_every=2",
    "gossip-pga:global_every=2,buffers=averaged",
    "adpsgd",
    "prague:sync_every=2",
    "choco:ratio=0.5",
    "noloco:sync_every=2",
)
"""One of each way in which buffers travel; `test_buffers` has every merge."""


@check
def statistics_are_never_what_no_batch_could_have() -> None:
    """A variance below zero is none, and the model that has one gives NaN when it is evaluated."""
    x, _ = batch(0, seed=7)
    for text in PROGRESS:
        model = DDP(Quiet(), gradient_as_bucket_view=True)
        optimizer = sgd(model)
        norm = model.module.norm

        def look(step: int, text: str = text, model: DDP = model, norm: nn.Module = norm) -> None:
            assert float(norm.running_var.min()) >= 0, f"{text}: {norm.running_var.min()} in step {step}"
            model.module.eval()
            with torch.no_grad():
                assert bool(model.module(x).isfinite().all()), f"{text}: step {step}"
            model.module.train()

        with tacit.attach(model, optimizer, text, steps_per_epoch=8, epochs=6) as session:
            train(model, optimizer, session, 48, look)
        assert same_on_all_ranks(norm.running_var), text
        # They follow the batches, late answers or not: none is left near the 1 of the beginning.
        assert 0.005 < float(norm.running_var.mean()) < 0.15, f"{text}: {norm.running_var.mean()}"


@check
def parameters_that_are_given_other_memory_are_found_there() -> None:
    for text in ("diloco:sync_every=2,outer_lr=0.01", "localsgd:sync_every=2,momentum=averaged", "odsgd"):
        found = []
        for moves in (False, True):
            model = DDP(convolutions(), gradient_as_bucket_view=True)
            optimizer = sgd(model)
            with tacit.attach(model, optimizer, text):
                for first in (0, 3, 6):
                    images(model, optimizer, 3, first)
                    for p in model.parameters() if moves else ():
                        p.data = p.data.clone()
            assert same_on_all_ranks(flat(model)), text
            found.append(flat(model))
        close_to(*found, 0.0)


@check
def parameters_in_another_order_of_memory_are_refused_as_ddp_mixes_up_their_gradients() -> None:
    for text in ("localsgd:sync_every=2", "topk"):
        model = DDP(convolutions(), gradient_as_bucket_view=True)
        optimizer = sgd(model)
        session = tacit.attach(model, optimizer, text)
        images(model, optimizer, 3)
        model.module.to(memory_format=torch.channels_last)
        says = (
            "0.weight was laid out in memory by strides (27, 9, 3, 1) when the session began, and is by (27"
        )
        raises(AttachError, lambda: images(model, optimizer, 1), says)  # noqa: B023
        session._leave()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 16, 5)
    )


def images(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x, y = torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 5, (4,), generator=g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@check
def channels_last_from_the_beginning_works() -> None:
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = DDP(convolutions().to(memory_format=layout), gradient_as_bucket_view=True)
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, "diloco:sync_every=2"):
            images(model, optimizer, 5)
        found.append(flat(model))
    close_to(*found, 2e-5)


@check
def compiled_sums_of_parameters_change_no_bit_in_either_order_of_memory() -> None:
    def trained(algorithm: str, layout: torch.memory_format, compiled: bool) -> Tensor:
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 5))
        )
        model = DDP(network.to(memory_format=layout), gradient_as_bucket_view=True)
        optimizer = sgd(model)
        loaded = deltas.numba_is_loaded if compiled else lambda: False
        with (
            patch.object(deltas, "numba_is_loaded", loaded),
            tacit.attach(model, optimizer, algorithm) as session,
        ):
            images(model, optimizer, 7)
            session.sync()
        return flat(model)

    for layout in (torch.contiguous_format, torch.channels_last):
        for algorithm in ("lowbit:sync_every=2,late=1", "lowbit", "localsgd:sync_every=2,bits=4"):
            fast, slow = (trained(algorithm, layout, compiled) for compiled in (True, False))
            assert deltas.numba_is_loaded() or active_backend() != "numba"
            assert torch.equal(fast, slow), (algorithm, layout)


@check
def parameters_that_are_other_objects_are_refused_by_name() -> None:
    for text in ("localsgd:sync_every=2", "topk"):
        model = wrapped()
        optimizer = sgd(model)
        session = tacit.attach(model, optimizer, text)
        state = copy.deepcopy(model.module.state_dict())
        model.module.load_state_dict(state)
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.module.load_state_dict(state, assign=True)
        says = "0.weight is another Parameter than when the session began"
        raises(AttachError, optimizer.step, says)
        if text != "topk":
            raises(AttachError, session.sync, "leave assign=True out")
        session._leave()


class Keeps(nn.Module):
    """With buffers of all kinds; `now` is assigned anew in every step, as custom modules do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 30), nn.Linear(30, 5)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))
        self.register_buffer("table", torch.randn(50, 40))
        self.register_buffer("ema", torch.zeros(30))
        self.register_buffer("matrix", torch.zeros(30, 20), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.now = nn.Module()
        self.now.register_buffer("low", torch.full((3,), torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
            self.matrix.mul_(0.5).add_(h.detach().T @ x, alpha=0.5)
            self.count += 1 + dist.get_rank()
            self.now.low = torch.minimum(self.now.low, h.detach()[0, :3])
        y: Tensor = self.last(h.relu())
        return y


@check
def buffers_of_all_kinds_meet() -> None:
    """In every round the mean of those that have changed, exactly; others do not travel."""
    sparse = tacit.Strategy(
        subject="delta",
        rounds=tacit.Every(2),
        compressor=ErrorFeedback(TopK(ratio=0.05)),
        merge=tacit.Average(),
    )
    for strategy in ("localsgd:sync_every=2", "diloco:sync_every=2", sparse, "ednncomm:sync_every=2"):
        model = DDP(Keeps(), gradient_as_bucket_view=True)
        optimizer = sgd(model)
        mask, table = model.module.mask.clone(), model.module.table.clone()
        with tacit.attach(model, optimizer, strategy) as session:
            for step in range(6):
                x, y = batch(step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                mine = copy.deepcopy(dict(model.module.named_buffers()))
                optimizer.step()
                if step % 2:
                    for name in ("ema", "matrix", "now.low"):
                        expected = torch.stack(everywhere(mine[name])).mean(0)
                        torch.testing.assert_close(dict(model.module.named_buffers())[name], expected)
                assert torch.equal(model.module.mask, mask)
                assert torch.equal(model.module.table, table)
            assert not same_on_all_ranks(model.module.count)
            if strategy == "localsgd:sync_every=2":
                sent = [record.bytes_out for record in session.session.stats.records]
        for name, buffer in model.module.named_buffers():
            assert same_on_all_ranks(buffer), name
        assert int(model.module.count) == 6, "the first rank's, as DDP would have it"
    n = flat(model).numel() + 30 + 600 + 3
    assert all(abs(each - 2 * 3 / 4 * 4 * n) < 400 for each in sent[1:]), (sent, n)


@check
def a_buffer_that_becomes_nan_on_one_rank_is_named_on_all() -> None:
    for name, value in (("ema", torch.nan), ("now.low", torch.inf), ("matrix", -torch.inf)):
        model = DDP(Keeps(), gradient_as_bucket_view=True)
        optimizer = sgd(model)
        session = tacit.attach(model, optimizer, "localsgd:sync_every=2")
        train(model, optimizer, session, 3)
        before = flat(model)
        x, y = batch(3)
        nn.functional.cross_entropy(model(x), y).backward()
        if dist.get_rank() == 2:
            dict(model.module.named_buffers())[name].view(-1)[1] = value
        says = f"the buffer {name} on rank 2, in step 3"
        raises(NonFinite, optimizer.step, says)
        assert not torch.equal(flat(model), before), "the step was taken, and the round came to nothing"
        session.close()


@check
def a_nan_is_told_with_where_it_began_and_not_where_it_came_to() -> None:
    """In one gradient of rank 1, in step 2; by the next round, in step 7, all of its parameters hold it."""
    for algorithm, net, name in (
        ("localsgd:sync_every=8", network(), "4.bias"),
        ("localsgd:sync_every=8", network(), "2.weight"),
        ("predictive:sync_every=8", network(), "4.bias"),
        ("localsgd:sync_every=8", Quiet(), "first.weight"),
    ):
        model = wrapped(net)
        optimizer = sgd(model)
        session = tacit.attach(model, optimizer, algorithm)

        def train(model: DDP = model, optimizer: torch.optim.Optimizer = optimizer, name: str = name) -> None:
            for step in range(8):
                x, y = batch(step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                if dist.get_rank() == 1 and step == 2:
                    grad = dict(model.module.named_parameters())[name].grad
                    assert grad is not None
                    grad.view(-1)[0] = torch.nan
                optimizer.step()

        raises(NonFinite, train, f"Rank 1 had it first in step 2, in {name}. Lower")
        session.close()


@check
def a_loss_that_is_nan_may_have_begun_anywhere() -> None:
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, "localsgd:sync_every=4")

    def train() -> None:
        for step in range(4):
            x, y = batch(step)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * (torch.nan if dist.get_rank() == 2 and step == 1 else 1.0)).backward()
            optimizer.step()

    says = "Rank 2 had it first in step 1, in 0.weight and in others too, so it may have begun in any of them"
    raises(NonFinite, train, says)
    session.close()


@check
def buffers_that_differ_when_a_session_begins_agree_after_a_round() -> None:
    model = DDP(Keeps(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    with torch.no_grad():
        model.module.table.mul_(1 + dist.get_rank())
    table = torch.stack(everywhere(model.module.table)).mean(0)
    with tacit.attach(model, optimizer, "localsgd:sync_every=2") as session:
        train(model, optimizer, session, 2)
        torch.testing.assert_close(model.module.table, table)
        assert same_on_all_ranks(model.module.table)


@check
def a_buffer_of_another_shape_is_refused_and_one_that_ddp_ignores_is_left_alone() -> None:
    for ignored in (False, True):
        module = Keeps()
        if ignored:
            DDP._set_params_and_buffers_to_ignore_for_model(module, ["table"])
        model = DDP(module, gradient_as_bucket_view=True)
        optimizer = sgd(model)
        session = tacit.attach(model, optimizer, "localsgd:sync_every=2")

        def grow(step: int, module: Keeps = module) -> None:
            if step == 0:
                module.table = torch.randn(60, 40) + dist.get_rank()

        if ignored:
            train(model, optimizer, session, 4, grow)
            assert not same_on_all_ranks(module.table)
        else:
            says = "the buffer table had the shape (50, 40) when the session began, and has (60, 40)"
            raises(AttachError, lambda: train(model, optimizer, session, 4, grow), says)  # noqa: B023
        session._leave()


@check
def what_was_local_is_averaged_where_it_is_now_when_the_session_closes() -> None:
    model = DDP(Keeps(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "localsgd:sync_every=2,buffers=local") as session:
        train(model, optimizer, session, 4)
        assert not same_on_all_ranks(model.module.ema)
        expected = torch.stack(everywhere(model.module.ema)).mean(0)
    torch.testing.assert_close(model.module.ema, expected)
    for name, buffer in model.module.named_buffers():
        assert same_on_all_ranks(buffer), name


@check
def a_run_with_buffers_is_resumed_bit_for_bit() -> None:
    texts = ("localsgd:sync_every=3", "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=2")
    for text in (*texts, "easgd:sync_every=3"):
        ends = []
        for stops in (False, True):
            model = DDP(Keeps(), gradient_as_bucket_view=True)
            optimizer = sgd(model)
            session = tacit.attach(model, optimizer, text)
            train(model, optimizer, session, 5)
            if stops:
                saved = copy.deepcopy([each.state_dict() for each in (model.module, optimizer, session)])
                matrix = model.module.matrix.clone()
                session.close()
                model = DDP(Keeps(), gradient_as_bucket_view=True)
                optimizer = sgd(model)
                session = tacit.attach(model, optimizer, text)
                for each, state in zip((model.module, optimizer, session), saved, strict=True):
                    each.load_state_dict(state)
                model.module.matrix.copy_(matrix)  # which is not in the model's state
            train(model, optimizer, session, 7, first=5)
            session.close()
            ends.append(copy.deepcopy([*model.parameters(), *model.buffers()]))
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), text


# ---- learning rates -----------------------------------------------------------------------------------


def rates_of(model: nn.Module) -> list[dict[str, object]]:
    """Groups with other rates: one that falls, one that is frozen by its rate."""
    first, second, third, fourth, *others = [
        *model.module.first.parameters(),
        *model.module.norm.parameters(),
        *model.module.last.parameters(),
    ]
    return [
        {"params": [second], "lr": 0.0},
        {"params": [first, fourth], "lr": 0.2},
        {"params": [third, *others], "lr": 0.02},
    ]


@check
def slow_momentum_is_in_units_of_each_groups_own_rate() -> None:
    beta, every = 0.6, 2
    model = DDP(Quiet(), gradient_as_bucket_view=True)
    reference = copy.deepcopy(model.module)
    ours = torch.optim.SGD(rates_of(model), lr=0.1)

    class Named:
        module = reference

    theirs = torch.optim.SGD(rates_of(Named()), lr=0.1)  # type: ignore[arg-type]
    outer = {p: p.detach().clone() for p in reference.parameters()}
    slow = {p: torch.zeros_like(p) for p in reference.parameters()}
    with tacit.attach(model, ours, f"slowmo:sync_every={every},momentum={beta}") as session:
        for step in range(8):
            if step == 5:
                for each in (ours, theirs):
                    each.param_groups[1]["lr"] = 0.05
            train(model, ours, session, 1, first=step)
            x, y = batch(step)
            theirs.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            theirs.step()
            if (step + 1) % every:
                continue
            with torch.no_grad():
                for group in theirs.param_groups:
                    for p in group["params"]:
                        mean = torch.stack(everywhere(p.detach())).mean(0)
                        if group["lr"]:
                            slow[p].mul_(beta).add_((outer[p] - mean) / group["lr"])
                            outer[p] -= group["lr"] * slow[p]
                        else:
                            outer[p].copy_(mean)
                        p.copy_(outer[p])
            close_to(flat(model), flat(reference), 1e-5)
    moved = [not torch.equal(a, b) for a, b in pairwise([*Quiet().parameters(), *model.parameters()])]
    assert any(moved)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What tacit warns of meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tacit").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("tacit").removeHandler(handler)


@check
def epochs_are_of_steps_and_not_of_batches() -> None:
    for algorithm, passes, warns in (("ednncomm", 4, True), ("ednncomm", 1, False), ("localsgd", 4, False)):
        model = wrapped()
        optimizer = sgd(model)
        known = {"steps_per_epoch": 100} if algorithm == "ednncomm" else {}
        with heard() as said, tacit.attach(model, optimizer, algorithm, **known):
            steps(model, optimizer, 40, micro=passes)
        told = [each for each in said if "backward passes make a step" in each]
        assert len(told) == (warns and dist.get_rank() == 0), said
        for text in told:
            assert text.startswith("4 backward passes make a step here, and steps_per_epoch=100 counts steps")
            assert "steps_per_epoch=len(loader) // 4, here 25" in text


@check
def by_node_on_one_node_is_plain_ddp_and_says_so() -> None:
    for algorithm, shape, warns in (
        ("ednncomm", (1, 4), True),
        ("daso", (1, 4), True),
        ("ednncomm", (2, 2), False),
        ("daso", (4, 1), False),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("net", "node"))
        model = wrapped()
        with heard() as said:
            tacit.attach(model, sgd(model), algorithm, steps_per_epoch=5, epochs=2, mesh=mesh).close()
        told = [each for each in said if "plain DDP" in each]
        assert len(told) == (warns and dist.get_rank() == 0), said
        for text in told:
            assert text.startswith(f"all 4 ranks are on one node, where {algorithm!r} is plain DDP")
            assert "tacit run --cluster 2x2, or" in text
            assert '("cpu", (2, 2), mesh_dim_names' in text


if __name__ == "__main__":
    CHECKS.run()
