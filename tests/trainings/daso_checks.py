"""DASO on real Gloo processes, 2 nodes of 2: against its authors' procedure, written out as a plain loop."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from localsgd_checks import Odd, normed
from rank_training import Checks, close_to, everywhere, flat, network, raises, same_on_all_ranks, sgd, wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.algorithms import parse
from tacit.compressors import ErrorFeedback, TopK
from tacit.errors import ConfigError, NonFinite

CHECKS = Checks()
check = CHECKS.add

NODES = [[0, 1], [2, 3]]
EPOCH = 10
WAYS = ("turns", "slices", "leaders")


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """This rank's own."""
    g = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [(torch.randn(8, 20, generator=g), torch.randint(0, 5, (8,), generator=g)) for _ in range(count)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: tacit.Attached,
    data: list[tuple[Tensor, Tensor]],
    after: Callable[[int], None] = lambda step: None,
) -> None:
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        session.observe(loss.detach())
        optimizer.step()
        after(step)


def daso(
    text: str,
    data: list[tuple[Tensor, Tensor]],
    epochs: int,
    model: nn.Module | None = None,
    after: Callable[[int], None] = lambda step: None,
    lr: float = 0.05,
) -> Tensor:
    """The parameters after training with DASO, before the session closes."""
    ddp = wrapped(model)
    optimizer = sgd(ddp)
    optimizer.param_groups[0]["lr"] = lr
    with tacit.attach(ddp, optimizer, text, steps_per_epoch=EPOCH, epochs=epochs) as session:
        train(ddp, optimizer, session, data, after)
        found = flat(ddp)
    assert same_on_all_ranks(flat(ddp))
    return found


class Written:
    """Heat's procedure, by its pseudo-code; but node mates are averaged, and lags are what they are."""

    def __init__(
        self, cycle: tuple[int, int, int], warm: int, cool: int, epochs: int, patience: int = 100
    ) -> None:
        self.cycle, self.blocking = cycle, [*range(warm), *range(epochs - cool, epochs)]
        self.warm, self.cool, self.epochs, self.patience = warm, cool, epochs, patience
        self.best, self.bad, self.cycles = math.inf, 0, [cycle]
        groups = [dist.new_group(ranks) for ranks in NODES]
        self.node = groups[dist.get_rank() // 2]
        self.model = network()
        self.optimizer = sgd(self.model)
        self.pending: tuple[Tensor, int] | None = None
        self.inside = True

    def run(self, data: list[tuple[Tensor, Tensor]], losses: list[float] | None = None) -> Tensor:
        for step, batch in enumerate(data):
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            if self.inside:
                for p in self.model.parameters():
                    assert p.grad is not None
                    p.grad = self.mates(p.grad)
            self.optimizer.step()
            self.put(self.after(step, flat(self.model)))
            if losses is not None and step % EPOCH == EPOCH - 1:
                self.epoch_loss_logic(step // EPOCH + 1, losses[step // EPOCH])
        return flat(self.model)

    def epoch_loss_logic(self, epoch: int, loss: float) -> None:
        """Of an epoch that has ended, when the counter of epochs has moved on."""
        if epoch < self.warm or epoch >= self.epochs - self.cool:
            return  # and with epoch == warm, the loss of the last epoch that warms up is judged
        better = loss < self.best * 0.95
        self.best, self.bad = (loss, 0) if better else (self.best, self.bad + 1)
        if self.bad > self.patience:
            (every, wait, skip), self.bad = self.cycle, 0
            shorter = every // 2, max(1, wait - 1), max(1, skip // 2)
            self.cycle = shorter if every > 1 else (8, 2, 2)
        self.cycles.append(self.cycle)

    def mates(self, x: Tensor) -> Tensor:
        dist.all_reduce(x := x / 2, group=self.node)
        return x

    def everybody(self, x: Tensor) -> Tensor:
        dist.all_reduce(x := x / 4)
        return x

    def put(self, x: Tensor) -> None:
        nn.utils.vector_to_parameters(x, self.model.parameters())

    def merge(self, x: Tensor, step: int) -> Tensor:
        if self.pending is None:
            return x
        (mean, sent), self.pending = self.pending, None
        lag = step - sent
        return (2 * lag * self.mates(x) + 2 * mean) / (2 * lag + 2)

    def after(self, step: int, x: Tensor) -> Tensor:
        (every, wait, skip), k, last = self.cycle, step % EPOCH, EPOCH - 1
        if step // EPOCH in self.blocking:
            return self.everybody(x)
        wait = min(wait, last - k)
        if k == last or k % every == 0:
            mean = self.everybody(x)
            x = self.merge(x, step)
            if k == last:
                return mean
            self.pending = mean, step
            return x
        if (k + 1) % every == 0:
            self.inside = True
            return x
        if k % every == wait:
            x = self.merge(x, step)
            self.inside = skip == 1
        elif k % every > wait:
            self.inside = skip == 1 or not self.inside
        if k + 1 == last:
            self.inside = True
        return x


@check
def daso_is_its_authors_loop() -> None:
    for cycle, ways in (((4, 1, 1), WAYS), ((1, 1, 1), WAYS[:1]), ((8, 2, 2), WAYS[1:2])):
        data = batches(4 * EPOCH)
        expected = Written(cycle, 1, 1, epochs=4).run(data)
        for by in ways:
            every, wait, skip = cycle
            text = f"daso:period={every},delay={wait},local={skip},warmup_epochs=1,cooldown_epochs=1"
            # One epoch's loss after the other is below the best: no plateau comes in between.
            found = daso(f"{text},patience=100,bits=32,by={by}", data, epochs=4)
            close_to(found, expected, 2e-5)


@check
def daso_changes_its_periods_when_its_authors_loop_does() -> None:
    epochs = 7
    data = batches(epochs * EPOCH)
    # Better than the last epoch that warms up is none of the next three; then one is.
    losses = [2.0, 1.0, 1.1, 1.2, 1.3, 0.5, 0.5]
    expected = Written((4, 1, 1), 2, 1, epochs, patience=1)
    there = expected.run(data, losses)
    assert expected.cycles == [(4, 1, 1), (4, 1, 1), (4, 1, 1), (2, 1, 1), (2, 1, 1)]
    ddp = wrapped()
    optimizer = sgd(ddp)
    text = "daso:warmup_epochs=2,cooldown_epochs=1,patience=1,bits=32"
    with tacit.attach(ddp, optimizer, text, steps_per_epoch=EPOCH, epochs=epochs) as session:
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            session.observe(losses[step // EPOCH])
            optimizer.step()
        close_to(flat(ddp), there, 5e-5)


@check
def daso_keeps_node_mates_equal_and_ends_every_epoch_with_equal_replicas() -> None:
    model = normed()
    ddp = wrapped(model)
    optimizer = sgd(ddp)
    rank, apart = dist.get_rank(), 0
    with tacit.attach(ddp, optimizer, "daso", steps_per_epoch=EPOCH, epochs=3) as session:

        def look(step: int) -> None:
            nonlocal apart
            replicas = everywhere(flat(ddp))
            assert torch.equal(replicas[rank], replicas[rank ^ 1]), f"node mates differ after step {step}"
            apart += not torch.equal(replicas[0], replicas[2])
            if (step + 1) % EPOCH == 0:
                assert same_on_all_ranks(flat(ddp)), f"replicas differ at the end of the epoch, step {step}"
                assert same_on_all_ranks(model[1].running_mean)

        train(ddp, optimizer, session, batches(3 * EPOCH), look)
        assert apart == 3 * (EPOCH - 1)
        # 0, 4, 8 and 9 in each epoch.
        assert session.levels[1].session.stats.totals.rounds == 12


@check
def daso_blocks_in_bf16_without_losing_small_updates() -> None:
    for lr in (0.1, 1e-3):
        start = flat(network())
        text = "daso:warmup_epochs=1,cooldown_epochs=0"
        exact = daso(f"{text},bits=32", batches(EPOCH), epochs=1, lr=lr) - start
        rounded = daso(text, batches(EPOCH), epochs=1, lr=lr) - start
        error = float((rounded - exact).norm() / exact.norm())
        assert 0 < error < 0.01, error


@check
def daso_says_blocking_phases_in_bf16_and_late_rounds_in_fp32() -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    text = "daso:warmup_epochs=1,cooldown_epochs=1,by=slices"
    with tacit.attach(ddp, optimizer, text, steps_per_epoch=EPOCH, epochs=3) as session:
        train(ddp, optimizer, session, batches(3 * EPOCH))
        sent = {each.step: each.bytes_out for each in session.levels[1].session.stats.records}
    n = flat(ddp).numel()
    # On 2 nodes of 2 a rank sends its half of the parameters across, and what came of it in its node.
    biases = 300 + 400 + 5
    near = 4 * (n / 2)
    for step in (0, EPOCH - 1, 2 * EPOCH, 3 * EPOCH - 1):
        assert abs(sent[step] - near - 2 * (n / 2)) <= 4 * biases, (step, sent[step], n)
    for step in (EPOCH, EPOCH + 4, 2 * EPOCH - 1):
        assert abs(sent[step] - near - 4 * (n / 2)) <= 4 * biases, (step, sent[step], n)


@check
def daso_takes_turns() -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    n, mine = flat(ddp).numel(), dist.get_rank() % 2
    with tacit.attach(ddp, optimizer, "daso:period=1,bits=32", steps_per_epoch=4, epochs=2) as session:
        train(ddp, optimizer, session, batches(8))
        records = session.levels[1].session.stats.records
    # In turn, a rank sends what both have across, and the mean to its mate.
    for record in records:
        in_turn = record.step % 4 % 2 == mine
        assert abs(record.bytes_out - 8 * n * in_turn) < 0.01 * n, (record, n)


@check
def daso_with_one_rank_a_node_and_with_one_node() -> None:
    for shape, ways in (((4, 1), WAYS), ((1, 4), WAYS)):
        for by in ways:
            ddp = wrapped()
            optimizer = sgd(ddp)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("net", "node"))
            text = f"daso:by={by},warmup_epochs=1"
            with tacit.attach(ddp, optimizer, text, steps_per_epoch=5, epochs=3, mesh=mesh) as session:

                def look(step: int, ddp: DDP = ddp, shape: tuple[int, int] = shape) -> None:
                    equal = same_on_all_ranks(flat(ddp))
                    assert equal == (shape == (1, 4) or step < 5 or (step + 1) % 5 == 0), step

                train(ddp, optimizer, session, batches(15), look)


@check
def daso_leaves_pretrained_and_frozen_weights() -> None:
    model = Odd()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    before = copy.deepcopy(model.state_dict())
    ddp = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=0.001)  # every matrix is larger than that
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with tacit.attach(ddp, optimizer, "daso:warmup_epochs=0,bits=32", steps_per_epoch=4, epochs=2) as session:
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        train(ddp, optimizer, session, batches(6))
        session.sync()
        after = model.state_dict()
        for name, was in before.items():
            moved = not torch.equal(was, after[name])
            assert moved != name.startswith("frozen"), name
            assert same_on_all_ranks(after[name])
        assert torch.equal(after["a.weight"], after["b.weight"])


@check
def daso_resumes_between_send_and_receive() -> None:
    text = "daso:period=8,delay=3,local=2,by=slices"
    data = batches(2 * EPOCH + 5)

    def run(stop: int) -> Tensor:
        """The parameters where it stopped after so many steps; 0: it did not."""
        ddp = wrapped()
        optimizer = sgd(ddp)
        session = tacit.attach(ddp, optimizer, text, steps_per_epoch=EPOCH, epochs=5)
        train(ddp, optimizer, session, data[:stop])
        if stop:
            saved = copy.deepcopy([each.state_dict() for each in (ddp.module, optimizer, session)])
            session.close()
            ddp = wrapped()
            optimizer = sgd(ddp)
            session = tacit.attach(ddp, optimizer, text, steps_per_epoch=EPOCH, epochs=5)
            for each, state in zip((ddp.module, optimizer, session), saved, strict=True):
                each.load_state_dict(state)
        train(ddp, optimizer, session, data[stop:])
        found = flat(ddp)
        session.close()
        return found

    never = run(0)
    for stop in (EPOCH + 1, EPOCH + 2, EPOCH + 4, 9):
        assert torch.equal(run(stop), never), f"stopped after {stop} steps"


@check
def daso_halves_its_period_on_a_plateau() -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    with tacit.attach(ddp, optimizer, "daso:patience=0", steps_per_epoch=4, epochs=9) as session:
        periods = []
        for step, batch in enumerate(batches(16)):
            loss_of(ddp, batch).backward()
            session.observe(1.0 + dist.get_rank())  # the mean is what counts, and it does not fall
            optimizer.step()
            if step % 4 == 3:
                periods.append(session.levels[0].session.schedule.state["period"])
        assert periods == [4, 2, 1, 8]


@check
def daso_chooses_its_period() -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    with tacit.attach(ddp, optimizer, "daso:period=auto,bits=16", steps_per_epoch=20, epochs=3) as session:
        train(ddp, optimizer, session, batches(60))  # no loss is needed, but may be told
        schedule_state = session.levels[1].session.schedule.state
        period = torch.tensor([schedule_state["period"]])
        assert same_on_all_ranks(period)
        assert schedule_state["asked"] >= 3
        assert float(period) >= 1


@check
def daso_goes_with_other_compressors_and_with_what_stands_beside() -> None:
    near, far = parse("daso:by=slices,bits=32").levels
    sparse = replace(far, compressor=ErrorFeedback(TopK(0.1)))
    for strategy in (tacit.Levels((near, sparse)), "daso:by=slices,bits=4", "daso:momentum=averaged"):
        ddp = wrapped(normed())
        optimizer = sgd(ddp)
        with tacit.attach(ddp, optimizer, strategy, steps_per_epoch=EPOCH, epochs=2) as session:
            train(ddp, optimizer, session, batches(2 * EPOCH))
        assert same_on_all_ranks(flat(ddp))
    raises(ConfigError, lambda: replace(sparse, topology=far.topology.__class__("turns")), "by='slices'")


@check
def daso_refuses_what_it_cannot_know() -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    raises(
        tacit.AttachError,
        lambda: tacit.attach(ddp, optimizer, "daso", steps_per_epoch=5),
        "not given the number of epochs: write attach(..., epochs=10), and session.observe(loss) before",
    )
    raises(
        tacit.AttachError,
        lambda: tacit.attach(ddp, optimizer, "daso"),
        "write attach(..., steps_per_epoch=len(loader) // accumulation, epochs=10), and session.observe("
        "loss) before each optimizer.step(); accumulation: how many backward passes make a step, 1 where",
    )
    session = tacit.attach(ddp, optimizer, "daso", steps_per_epoch=5, epochs=2)

    def without_a_loss() -> None:
        for batch in batches(5):
            loss_of(ddp, batch).backward()
            optimizer.step()

    raises(ConfigError, without_a_loss, "session.observe(loss) was not called at all: call it in every step")
    session.close()


@check
def daso_tells_all_ranks_of_a_nan() -> None:
    ddp = wrapped()
    optimizer = sgd(ddp)
    session = tacit.attach(ddp, optimizer, "daso", steps_per_epoch=6, epochs=2)

    def spoil(step: int) -> None:
        if step == 4 and dist.get_rank() > 1:  # on the whole node, as there are no gradients of one's own
            optimizer.state[next(ddp.parameters())]["momentum_buffer"].view(-1)[0] = float("nan")

    text = "the parameter 0.weight on rank 2"  # which is in turn
    raises(NonFinite, lambda: train(ddp, optimizer, session, batches(12), spoil), text)
    session.close()


if __name__ == "__main__":
    CHECKS.run()
