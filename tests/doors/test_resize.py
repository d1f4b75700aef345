"""Checkpoints into another number of ranks, for every family, on a loopback."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from launching import ranks
from torch import Tensor

import tacit
from tacit import algorithms
from tacit.doors import state
from tacit.errors import CheckpointError
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.transports.loopback import Loopback, Seat

NAMED = {"a": torch.zeros(30, 10), "b": torch.zeros(10), "c": torch.zeros(41, 5)}
LOTS = [["c"], ["b", "a"]]

STRATEGIES: dict[str, Strategy] = {
    name: parsed
    for name in algorithms.known()
    for parsed in algorithms.parse(name).levels[:1]
    if parsed.subject == "gradient" and len(algorithms.parse(name).levels) == 1
}
for compressor in (tacit.TopK(ratio=0.1), tacit.PowerSGD(rank=1)):
    for by in ("slices", "leaders"):
        STRATEGIES[f"{type(compressor).__name__} by {by}"] = tacit.Strategy(
            compressor=tacit.ErrorFeedback(compressor), topology=tacit.Hierarchical(by=by)
        )


@dataclass
class Seated:
    session: Session
    gradient: None = None
    progress: None = None


class Run:
    """Ranks of a run, on nodes, that exchange gradients and are saved and loaded."""

    def __init__(self, strategy: Strategy, nodes: int, ranks: int) -> None:
        self.strategy = strategy
        self.net = Loopback.of_nodes(nodes, ranks)
        self.seats = [
            Seated(Session(strategy, NAMED, Seat(self.net, rank), LOTS)) for rank in range(nodes * ranks)
        ]

    def round(self, seed: int) -> dict[str, Tensor]:
        """The mean by parameter of a round on random tensors."""
        generator = torch.Generator().manual_seed(seed)
        sessions = [seat.session for seat in self.seats]
        means = {}
        for i, lot in enumerate(sessions[0].lots):
            xs = [torch.randn(lot.numel, generator=generator) for _ in sessions]
            for session, done in zip(
                sessions,
                self.net.run([s.open(i, x) for s, x in zip(sessions, xs, strict=True)]),
                strict=True,
            ):
                session.land(i, done)
            means |= {slot.name: xs[0][slot.start : slot.stop] for slot in lot.slots}
        return means

    def owed(self) -> dict[str, Tensor]:
        """What the mean still has to receive, by parameter: of each rank, or of each node, the mean."""
        total = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        by_node = self.seats[0].session.by_node
        units = len(self.net.groups("node")) if by_node else len(self.seats)
        for seat in self.seats:
            for (name, field), kept in seat.session.named_state().items():
                if "residual" in field:
                    stretch = total[name][kept.start : kept.start + kept.tensor.numel()]
                    stretch += kept.tensor / units
        return total

    def save(self) -> list[dict[str, Any]]:
        wholes = self.net.run([seat.session.gathered() for seat in self.seats])
        return [
            state.told(self.strategy, [seat], [whole]) for seat, whole in zip(self.seats, wholes, strict=True)
        ]

    def load(self, saved: dict[str, Any]) -> None:
        for seat in self.seats:
            state.load(saved, self.strategy, [seat])

    def tensors(self) -> list[Tensor]:
        return [kept.tensor for seat in self.seats for kept in seat.session.named_state().values()]


def trained(strategy: Strategy, nodes: int, ranks: int) -> Run:
    run = Run(strategy, nodes, ranks)
    for seed in range(3):
        run.round(seed)
    return run


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1), (3, 2), (4, 1), (2, 3), (1, 1)])
def test_what_is_owed_is_conserved(name: str, nodes: int, ranks: int) -> None:
    old = trained(STRATEGIES[name], 2, 2)
    new = Run(STRATEGIES[name], nodes, ranks)
    new.load(state.join_states(old.save()))
    before, after = old.owed(), new.owed()
    for parameter in NAMED:
        torch.testing.assert_close(after[parameter], before[parameter])
    assert [seat.session.round for seat in new.seats] == [3] * (nodes * ranks)
    new.round(7)


@pytest.mark.parametrize("name", STRATEGIES)
def test_in_the_same_shape_it_goes_on_bit_for_bit(name: str) -> None:
    old = trained(STRATEGIES[name], 2, 2)
    saved = old.save()
    for whole in (False, True):
        new = Run(STRATEGIES[name], 2, 2)
        for seat, mine in zip(new.seats, saved, strict=True):
            state.load(state.join_states(saved) if whole else mine, new.strategy, [seat])
        assert all(torch.equal(a, b) for a, b in zip(old.tensors(), new.tensors(), strict=True))
        again = trained(STRATEGIES[name], 2, 2)
        for seed in (8, 9):
            a, b = again.round(seed), new.round(seed)
            assert all(torch.equal(a[parameter], b[parameter]) for parameter in NAMED)


def test_the_log_tells_of_it_once(caplog: pytest.LogCaptureFixture) -> None:
    new = Run(STRATEGIES["topk"], 1, 2)
    new.load(state.join_states(trained(STRATEGIES["topk"], 2, 2).save()))
    assert [record.message for record in caplog.records] == [
        "a checkpoint of 4 ranks on 2 nodes goes on with 2 on 1 nodes: each has got the mean of what the old "
        "ones owed"
    ]


@pytest.mark.parametrize("name", ["topk", "powersgd", "TopK by slices"])
def test_what_some_rank_owed_must_be_there(name: str) -> None:
    saved = trained(STRATEGIES[name], 2, 2).save()
    new = Run(STRATEGIES[name], 1, 2)
    before = [tensor.clone() for tensor in new.tensors()]
    for part in (saved[:1], saved[:2]):
        with pytest.raises(CheckpointError, match=r"what (rank|node)\d kept of .*/residual is not in it"):
            new.load(state.join_states(part))
    assert all(torch.equal(a, b) for a, b in zip(before, new.tensors(), strict=True))


def test_states_of_different_moments_are_not_joined() -> None:
    run = trained(STRATEGIES["topk"], 2, 1)
    early = run.save()
    run.round(5)
    with pytest.raises(CheckpointError, match=r"not of one moment: rounds is \[3\] in one and \[4\]"):
        state.join_states([early[0], run.save()[1]])
    with pytest.raises(CheckpointError, match="no states to join"):
        state.join_states([])


def test_another_strategy_is_named_beside_this_one() -> None:
    saved = trained(STRATEGIES["topk"], 2, 1).save()
    run = Run(STRATEGIES["sign"], 2, 1)
    with pytest.raises(CheckpointError, match=r"is of Strategy\(.*TopK.*attached is Strategy\(.*Sign"):
        run.load(saved[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[object, dict[str, object]]]:
    """A folder of checkpoints that four processes have saved, and what they owed then."""
    folder = str(tmp_path_factory.mktemp("saved"))
    ended = ranks("resizing.py", 4, "save", folder)
    assert [each.code for each in ended] == [0] * 4, ended[0].text
    return folder, {entry["name"]: entry for entry in ended[0].said}


@pytest.mark.parametrize(("world", "mode"), [(2, "files"), (2, "dcp"), (6, "files")])
def test_real_processes_go_on_in_another_number(
    world: int, mode: str, saved: tuple[str, dict[object, dict[str, object]]]
) -> None:
    folder, before = saved
    ended = ranks("resizing.py", world, mode, folder)
    assert [each.code for each in ended] == [0] * world, ended[0].text
    assert "a checkpoint of 4 ranks goes on with" in ended[0].text
    assert len(ended[0].said) == len(before)
    for entry in ended[0].said:
        assert entry["equal"], entry
        assert entry["owed"] == pytest.approx(before[entry["name"]]["owed"], rel=1e-4, abs=1e-5), entry
        assert entry["rounds"] == before[entry["name"]]["rounds"] == 6
