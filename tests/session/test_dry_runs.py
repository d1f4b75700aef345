"""What an exchange costs is found once, and found anew where anything else could come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import BF16, Dense, ErrorFeedback, Part, Partition, TopK
from tacit.contracts import AxisRank, Compressor, Topology
from tacit.session import Session, exchange_plan
from tacit.session.dry_run_cache import RememberedRuns, unchanging
from tacit.strategy import Strategy
from tacit.topologies import Flat, Hierarchical, TwoPhase
from tacit.transports.loopback import Loopback, LoopbackTransport
from tacit.transports.meter import Cost, DryRun

NAMED = {"a": torch.zeros(30, 10), "b": torch.zeros(10)}
TOPK = ErrorFeedback(TopK(ratio=0.1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The buckets that were run dry, of an empty memory."""
    found: list[int] = []
    inner = exchange_plan.Plan._run_dry

    def run(self: exchange_plan.Plan, i: int, *rest: object) -> Cost:
        found.append(i)
        return inner(self, i, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange_plan, "_RUNS", RememberedRuns())
    monkeypatch.setattr(exchange_plan.Plan, "_run_dry", run)
    return found


def session(
    compressor: Compressor = TOPK,
    topology: Topology | None = None,
    world: int = 2,
    rank: int = 0,
    named: dict[str, Tensor] = NAMED,
    subject: str = "gradient",
) -> Session:
    net = Loopback.of_nodes(2, world // 2) if isinstance(topology, Hierarchical) else Loopback(world)
    level = parse("topk").levels[0] if subject == "gradient" else parse("localsgd").levels[0]
    strategy: Strategy = replace(level, compressor=compressor, topology=topology or Flat())
    return Session(strategy, named, LoopbackTransport(net, rank), [[*named]])


OTHERS: dict[str, Callable[[], Session]] = {
    "compressor": lambda: session(ErrorFeedback(TopK(ratio=0.2))),
    "topology": lambda: session(topology=TwoPhase()),
    "number of ranks": lambda: session(world=3),
    "rank": lambda: session(rank=1),
    "size": lambda: session(named={"a": torch.zeros(31, 10), "b": torch.zeros(10)}),
    "type": lambda: session(named={name: p.bfloat16() for name, p in NAMED.items()}),
    "subject": lambda: session(subject="delta"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_where_something_else_is_asked_it_is_run_again(other: str, runs: list[int]) -> None:
    session()
    assert runs == [0]
    again = session()
    assert runs == [0]
    OTHERS[other]()
    assert runs == [0, 0]
    assert again.store.costs == session().store.costs


def test_each_phase_is_run_once(runs: list[int]) -> None:
    warming = parse("topk:warmup_steps=10").levels[0].compressor
    first, second = session(warming), session(warming)
    runs.clear()
    changes = first.buckets[0].compressor.changes
    assert changes
    for each in (first, second):
        before = each.store.costs[0].sent["world"]
        x = torch.zeros(each.buckets[0].numel)
        for step in (0, changes[-1]):
            each.store.exchange(0, x, step, out=x, round=0, lr=0.0)
        assert each.store.costs[0].sent["world"] < before
    assert runs == [0]


@pytest.mark.parametrize("topology", [Flat(), TwoPhase(), Hierarchical()])
def test_what_is_remembered_is_what_is_found(
    topology: Topology, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[tuple[list[Cost], dict[str, Tensor]]]:
        sessions = [session(topology=topology, world=4, rank=rank) for rank in range(4)]
        return [(each.store.costs, each.store._workspaces[0].held) for each in sessions]

    first, count = found(), len(runs)
    remembered = found()
    assert len(runs) == count
    monkeypatch.setattr(exchange_plan, "_RUNS", RememberedRuns())
    for one, other, anew in zip(first, remembered, found(), strict=True):
        assert one[0] == other[0] == anew[0]
        shapes = [
            {key: (scratch.shape, scratch.dtype) for key, scratch in each[1].items()}
            for each in (one, other, anew)
        ]
        assert shapes[0] == shapes[1] == shapes[2]
    assert len(runs) > count


class Adjustable(Dense):
    """A compressor with something that is not compared."""

    rate = 1


@dataclass
class Open:
    """Not frozen."""

    inside: int = 0


@pytest.mark.parametrize("what", [Adjustable(), Open(), [1], print, torch.zeros(1), (TOPK, Open()), TopK])
def test_nothing_is_remembered_of_what_could_change(what: Any) -> None:
    assert not unchanging(what)
    memory, asked = RememberedRuns(), list[DryRun]()
    for _ in range(2):
        memory.run((what,), DryRun(), lambda _: AxisRank(), lambda work, _: asked.append(work) or Cost())  # type: ignore[func-returns-value]
    assert len(asked) == 2


def test_what_the_library_has_is_remembered() -> None:
    whole = Partition(TOPK, (Part(Dense(), ((100, 200),)),))
    assert unchanging((whole, Flat(), TwoPhase(), torch.float32, torch.device("cpu"), (1, "a", None, 0.5)))


def test_a_rank_at_another_place_of_an_axis_is_another() -> None:
    memory, asked = RememberedRuns(), list[AxisRank]()

    def run(_: DryRun, place: Callable[[str], AxisRank]) -> Cost:
        asked.append(place("node"))
        return Cost()

    for place in (AxisRank(0, 2), AxisRank(0, 2), AxisRank(1, 2)):
        memory.run(("key",), DryRun(), lambda _, place=place: place, run)  # type: ignore[misc]
    assert asked == [AxisRank(0, 2), AxisRank(1, 2)]


def test_what_was_asked_for_longest_ago_is_forgotten() -> None:
    memory, asked = RememberedRuns(capacity=2), list[str]()

    def ask(name: str) -> None:
        memory.run((name,), DryRun(), lambda _: AxisRank(), lambda *_: asked.append(name) or Cost())  # type: ignore[func-returns-value]

    for name in ("a", "b", "a", "c", "a", "b"):
        ask(name)
    assert asked == ["a", "b", "c", "b"]


def test_a_dry_run_that_fails_is_made_again() -> None:
    memory = RememberedRuns()

    def fail(*_: object) -> Cost:
        raise ValueError("no such exchange")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such exchange"):
            memory.run(("key",), DryRun(), lambda _: AxisRank(), fail)
    assert memory.run(("key",), DryRun(), lambda _: AxisRank(), lambda *_: Cost()) == Cost()


def test_types_of_two_bytes_have_costs_of_their_own(runs: list[int]) -> None:
    assert session(BF16()).store.costs != session(Dense()).store.costs
    assert runs == [0, 0]
