import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from tacit.algorithms import parse
from tacit.strategy import AnyStrategy
from tacit.timelines import Change, Exchange, Span, Step, Timeline, now
from tacit_lab import records
from tacit_lab.recipes import meter as meter_module
from tacit_lab.recipes import recipe as recipe_module
from tacit_lab.recipes.curves import NO_CURVES, Curves
from tacit_lab.recipes.meter import Meter, mean_over_ranks
from tacit_lab.recipes.progress import Progress
from tacit_lab.recipes.timing import KEPT, Timekeeper
from tacit_lab.recipes.training import Task, train


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("TACIT_INTERFACE", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Line(recipe_module.Recipe):
    """y = 2x by one weight, with the accuracies that a test wants to see."""

    name, epochs, target, batch = "line", 3, 0.9, 4
    accuracies = (0.5, 0.92, 0.91)

    def __init__(self) -> None:
        self._asked = iter(self.accuracies)

    def model(self, seed: int) -> torch.nn.Module:
        return recipe_module.seeded(lambda: torch.nn.Linear(1, 1, bias=False), seed)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def steps_per_epoch(self, world: int) -> int:
        return 2

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[recipe_module.Batch]:
        for _ in range(2):
            yield torch.ones(4, 1), torch.full((4, 1), 2.0)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean()

    def evaluate(self, model: torch.nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        return float("nan"), next(self._asked)


def strategy(algorithm: str) -> AnyStrategy | None:
    return None if algorithm == records.COMPUTE_ONLY else parse(algorithm)


def task_of(algorithm: str, target: float = 0.9) -> Task:
    return Task(
        strategy=strategy(algorithm), epochs=3, seed=0, target=target, cluster="local:1", shaped=False
    )


def timelines(algorithm: str) -> list[Timeline]:
    task = task_of(algorithm)
    kept: list[Timeline] = []
    train(task, Line(), lambda record: None, keep=kept.append)
    return kept


def run(algorithm: str, target: float = 0.9, curves: Curves = NO_CURVES) -> list[records.Record]:
    task = Task(
        strategy=strategy(algorithm), epochs=3, seed=0, target=target, cluster="local:1", shaped=False
    )
    written: list[records.Record] = []
    train(task, Line(), written.append, curves)
    return written


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("algorithm", ["ddp", records.COMPUTE_ONLY])
def test_a_run_writes_a_head_its_epochs_and_an_end(algorithm: str) -> None:
    head, *epochs, end = run(algorithm)
    assert isinstance(head, records.RunRecord)
    assert isinstance(end, records.EndRecord)
    assert (head.algorithm, head.recipe, head.parameters, head.world_size) == (algorithm, "line", 1, 1)
    assert bool(head.strategy) == (algorithm == "ddp")
    assert [(e.epoch, e.step, e.accuracy) for e in epochs] == [(1, 2, 0.5), (2, 4, 0.92), (3, 6, 0.91)]
    assert 0 < epochs[0].seconds < epochs[1].seconds < epochs[2].seconds == end.seconds
    assert (end.status, end.steps, end.accuracy, end.mb_between_nodes) == ("ok", 6, 0.91, None)
    assert end.seconds_to_target == epochs[1].seconds
    assert records.parse(end.to_json()).loss is None


class Notes(list[tuple[str, float, int]]):
    """A writer that only notes."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        self.append((tag, scalar_value, global_step))


@pytest.mark.usefixtures("alone")
def test_curves_hold_each_batch_each_epoch_and_the_sessions_numbers() -> None:
    notes = Notes()
    run("bf16", curves=Curves(notes))
    losses = [value for tag, value, _ in notes if tag == "train/loss"]
    assert losses == sorted(losses, reverse=True)
    assert [step for tag, _, step in notes if tag == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert [note for note in notes if note[0] == "test/accuracy"] == [
        ("test/accuracy", 0.5, 2),
        ("test/accuracy", 0.92, 4),
        ("test/accuracy", 0.91, 6),
    ]
    assert ("tacit/rounds", 6, 6) in notes


@pytest.mark.usefixtures("alone")
def test_a_target_that_was_not_reached_is_none() -> None:
    assert run(records.COMPUTE_ONLY, target=0.95)[-1].seconds_to_target is None


@pytest.mark.usefixtures("alone")
def test_progress_is_told_at_each_epochs_end(capsys: pytest.CaptureFixture[str]) -> None:
    run("ddp")
    told = [Progress.from_line(line) for line in capsys.readouterr().out.splitlines()]
    ends = {p.epoch: p for p in told if p is not None}
    assert [(p.epoch, p.step, p.steps, p.accuracy) for p in list(ends.values())[-3:]] == [
        (1, 2, 6, 0.5),
        (2, 4, 6, 0.92),
        (3, 6, 6, 0.91),
    ]


@pytest.mark.usefixtures("alone")
def test_a_meter_counts_bytes_inside_its_windows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100, 140, 150, 1000, 1007])
    monkeypatch.setattr(meter_module.counters, "transmitted", lambda interface: next(readings))
    monkeypatch.setenv("TACIT_INTERFACE", "eth0")
    monkeypatch.setenv("TACIT_NODES", "3")
    meter = Meter()
    with meter.window():
        assert meter.live()[1] == pytest.approx(40 * 3 / 1e6)
    assert meter.transmitted == 50
    with meter.window():
        pass
    assert meter.transmitted == 57


@pytest.mark.usefixtures("alone")
def test_a_meter_without_an_interface_counts_no_bytes() -> None:
    meter = Meter()
    with meter.window():
        assert meter.live()[1] is None
    assert meter.transmitted is None
    assert meter.seconds > 0
    assert mean_over_ranks(0.25, 3.0) == (0.25, 3.0)


class Paced(Line):
    """Three steps a run of which each notes the learning rate."""

    accuracies = (0.5,) * 3

    def rate(self, done: float) -> float:
        return done

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.rates.append(self.made.param_groups[0]["lr"])
        return super().loss(outputs, targets)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        self.rates: list[float] = []
        self.made = super().optimizer(model)
        return self.made


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("algorithm", ["ddp", "localsgd", records.COMPUTE_ONLY])
def test_the_recipe_decides_the_learning_rate_of_each_step(algorithm: str) -> None:
    task = task_of(algorithm)
    recipe = Paced()
    train(task, recipe, lambda record: None)
    assert recipe.rates == pytest.approx([0.1 * (step + 0.5) / 6 for step in range(6)])


class Framed(Line):
    """A convolution that is laid out channels-last, as those of the recipes of images are."""

    accuracies = (0.5,) * 3

    def model(self, seed: int) -> torch.nn.Module:
        build = recipe_module.seeded(lambda: torch.nn.Conv2d(3, 4, 3), seed)
        self.made: torch.nn.Module = build.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self.made

    def train_batches(self, epoch: int, rank: int, world: int, seed: int) -> Iterator[recipe_module.Batch]:
        generator = torch.Generator().manual_seed(epoch)
        for _ in range(2):
            images = torch.rand(2, 3, 5, 5, generator=generator)
            yield images.to(memory_format=torch.channels_last), torch.rand(2, 4, 3, 3, generator=generator)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("algorithm", ["ddp", "localsgd:sync_every=2"])
def test_how_parameters_lie_in_memory_changes_nothing(algorithm: str) -> None:
    weights = []
    for recipe, name in ((Framed(), algorithm), (Framed(), "compute-only")):
        train(task_of(name), recipe, lambda record: None)
        weights.append(recipe.made.weight.detach())
    torch.testing.assert_close(weights[0], weights[1])
    assert weights[0].is_contiguous(memory_format=torch.channels_last)


# ---- timelines ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_every_rank_tells_what_it_did_when() -> None:
    (found,) = timelines("localsgd:sync_every=2")
    assert (found.algorithm, found.rank, found.levels) == ("localsgd:sync_every=2", 0, ("exchange",))
    assert [step.step for step in found.steps] == list(range(6))
    assert [exchange.step for exchange in found.exchanges] == [1, 3, 5]
    assert min(found.steps[0].begun, found.exchanges[0].begun) == 0


@pytest.mark.usefixtures("alone")
def test_of_ranks_that_never_talk_nothing_is_told() -> None:
    assert timelines(records.COMPUTE_ONLY) == []


@pytest.mark.usefixtures("alone")
def test_an_evaluation_belongs_to_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(line: Line, model: torch.nn.Module, rank: int, world: int) -> tuple[float, float]:
        time.sleep(0.2)
        return 0.0, 0.5

    monkeypatch.setattr(Line, "evaluate", slow)
    (found,) = timelines("ddp")
    gaps = [after.begun - before.ended for before, after in pairwise(found.steps)]
    assert min(gaps[1], gaps[3]) >= 0.2


class Told:
    """A session that has taken so many steps of a second."""

    def __init__(self) -> None:
        self.steps = 0
        self.origin = now()

    def timeline(self) -> Timeline:
        last = range(max(0, self.steps - 1000), self.steps)
        return Timeline(
            algorithm="it",
            rank=0,
            origin=self.origin,
            levels=("exchange",),
            steps=tuple(Step(i, float(i), i + 1.0) for i in last),
            exchanges=tuple(
                Exchange(0, i, i, i + 0.5, i + 0.75, 8, False, (Span(i + 0.5, i + 0.75),)) for i in last
            ),
            changes=(Change(0, 0, {"period": 8.0}), Change(0, self.steps, {"period": 4.0})),
        )


@pytest.mark.usefixtures("alone")
def test_of_a_long_run_the_middle_is_kept_and_its_whole_schedule() -> None:
    session = Told()
    times = Timekeeper("it:k=1", session, steps=5000)
    times.began()
    for _ in range(50):
        session.steps += 100
        times.paused(session.steps)
    (found,) = times.gather()
    assert found.algorithm == "it:k=1"
    assert [step.step for step in found.steps] == list(range(2500 - KEPT // 2, 2500 + KEPT // 2))
    assert len(found.exchanges) == KEPT
    assert [change.step for change in found.changes] == [0, 5000]
