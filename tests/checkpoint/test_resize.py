"""Checkpoints into another number of ranks, for every family, on a loopback."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tacit
from rank_processes import ranks
from tacit import algorithms
from tacit.checkpoint import session_state
from tacit.contracts import Topology
from tacit.errors import CheckpointError
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies import Star
from tacit.topologies.two_phase import SECOND
from tacit.transports.loopback import Loopback, LoopbackTransport

NAMED = {"a": torch.zeros(30, 10), "b": torch.zeros(10), "c": torch.zeros(41, 5)}
LARGE = {"a": torch.zeros(100, 70), "b": torch.zeros(70), "c": torch.zeros(64, 50)}
"""Enough for six ranks to share each bucket out."""
LOTS = [["c"], ["b", "a"]]

STRATEGIES: dict[str, Strategy] = {
    name: parsed
    for name in algorithms.known()
    for parsed in algorithms.parse({"powersgd": "powersgd:rank=2"}.get(name, name)).levels[
        :1
    ]  # small matrices
    if parsed.subject == "gradient" and len(algorithms.parse(name).levels) == 1
    if not isinstance(parsed.topology, Star)
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
    taken: None = None


class Run:
    """Ranks of a run, on nodes, that exchange gradients and are saved and loaded."""

    def __init__(
        self, strategy: Strategy, nodes: int, ranks: int, named: dict[str, Tensor] | None = None
    ) -> None:
        self.strategy = strategy
        self.named = named or NAMED
        self.net = Loopback.of_nodes(nodes, ranks)
        self.seats = [
            Seated(Session(strategy, self.named, LoopbackTransport(self.net, rank), LOTS))
            for rank in range(nodes * ranks)
        ]

    @property
    def topology(self) -> Topology:
        """What was chosen, on all ranks alike."""
        (found,) = {seat.session.strategy.topology for seat in self.seats}
        return found

    def round(self, seed: int) -> dict[str, Tensor]:
        """The mean by parameter of a round on random tensors."""
        generator = torch.Generator().manual_seed(seed)
        sessions = [seat.session for seat in self.seats]
        means = {}
        for i, bucket in enumerate(sessions[0].buckets):
            xs = [torch.randn(bucket.numel, generator=generator) for _ in sessions]
            for session, done in zip(
                sessions,
                self.net.run([s.open(i, x) for s, x in zip(sessions, xs, strict=True)]),
                strict=True,
            ):
                session.complete(i, done)
            means |= {slot.name: xs[0][slot.start : slot.stop] for slot in bucket.slices}
        return means

    def new_residual(self) -> dict[str, Tensor]:
        """What the mean still has to receive, by parameter: of each rank, or of each node, the mean."""
        total = {name: torch.zeros(p.numel()) for name, p in self.named.items()}
        by_node = self.seats[0].session.context.by_node
        units = len(self.net.groups("node")) if by_node else len(self.seats)
        for seat in self.seats:
            for (name, field), kept in seat.session.store.named_state().items():
                stretch = total[name][kept.start : kept.start + kept.tensor.numel()]
                if "residual" in field:
                    stretch += kept.tensor / units
                elif field == SECOND:
                    stretch += kept.tensor
        return total

    def save(self) -> list[dict[str, Any]]:
        wholes = self.net.run([seat.session.store.gathered() for seat in self.seats])
        return [
            session_state.saved(self.strategy, [seat], [whole])
            for seat, whole in zip(self.seats, wholes, strict=True)
        ]

    def load(self, saved: dict[str, Any]) -> None:
        for seat in self.seats:
            session_state.load(saved, self.strategy, [seat])

    def tensors(self) -> list[Tensor]:
        return [kept.tensor for seat in self.seats for kept in seat.session.store.named_state().values()]


def trained(strategy: Strategy, nodes: int, ranks: int, named: dict[str, Tensor] | None = None) -> Run:
    run = Run(strategy, nodes, ranks, named)
    for seed in range(3):
        run.round(seed)
    return run


@cache
def four(name: str) -> Run:
    """Trained on two nodes of two; it stays as it is."""
    return trained(STRATEGIES[name], 2, 2)


LAYOUTS = [(1, 2), (2, 1), (3, 2), (4, 1), (2, 3), (1, 1)]


@pytest.mark.parametrize(
    ("name", "nodes", "ranks"),
    # In turns, but where nodes owe: who splits what is owed knows of the layout alone.
    [
        (name, *layout)
        for i, name in enumerate(STRATEGIES)
        for j, layout in enumerate(LAYOUTS)
        if (i + j) % 2 or " by " in name
    ],
)
def test_what_is_owed_is_conserved(name: str, nodes: int, ranks: int) -> None:
    old = four(name)
    before = old.new_residual()
    new = Run(STRATEGIES[name], nodes, ranks)
    new.load(session_state.join_states(old.save()))
    after = new.new_residual()
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
            session_state.load(session_state.join_states(saved) if whole else mine, new.strategy, [seat])
        assert all(torch.equal(a, b) for a, b in zip(old.tensors(), new.tensors(), strict=True))
        again = trained(STRATEGIES[name], 2, 2)
        for seed in (8, 9):
            a, b = again.round(seed), new.round(seed)
            assert all(torch.equal(a[parameter], b[parameter]) for parameter in NAMED)


def test_the_log_tells_of_it_once(caplog: pytest.LogCaptureFixture) -> None:
    new = Run(STRATEGIES["topk"], 1, 2)
    new.load(session_state.join_states(trained(STRATEGIES["topk"], 2, 2).save()))
    assert [record.message for record in caplog.records] == [
        "a checkpoint of 4 ranks on 2 nodes goes on with 2 on 1 nodes: each has got the mean of the old "
        "residuals"
    ]


@pytest.mark.parametrize(("shard", "told"), [(0, ["a checkpoint of 4 replicas"]), (1, [])])
def test_of_sharded_models_replicas_are_counted_and_one_shard_says_so(
    shard: int, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    new, saved = Run(STRATEGIES["topk"], 1, 2), trained(STRATEGIES["topk"], 1, 4).save()
    levels = new.seats[:1]
    session_state.load(session_state.join_states(saved), new.strategy, levels, shard=shard)
    assert [record.message[: len("a checkpoint of 4 replicas")] for record in caplog.records] == told


UNDECIDED = {
    "int8": algorithms.parse("int8").levels[0],
    "topk": algorithms.parse("topk:ratio=0.5,topology=auto").levels[0],
    "dgc": algorithms.parse("dgc:ratio=0.5,topology=auto").levels[0],
    "by node": tacit.Strategy(compressor=tacit.ErrorFeedback(tacit.Int8()), topology=tacit.Hierarchical()),
}
"""Where from three ranks on the session picks two phases."""
CHANGES = [((1, 4), (1, 2)), ((1, 4), (1, 1)), ((1, 4), (1, 6)), ((1, 2), (1, 4)), ((4, 1), (2, 2))]


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("name", ["int8", "topk", "dgc", "by node"])
def test_checkpoints_go_from_two_phases_to_an_all_gather_and_back(
    name: str, before: tuple[int, int], after: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = UNDECIDED[name]
    old, new = trained(strategy, *before, LARGE), Run(strategy, *after, LARGE)
    new_residual = old.new_residual()
    assert all(float(new_residual[parameter].abs().sum()) > 0 for parameter in "ac")
    new.load(session_state.join_states(old.save()))
    for parameter in LARGE:
        torch.testing.assert_close(new.new_residual()[parameter], new_residual[parameter])
    two_phases = ["TwoPhase" in repr(run.topology) for run in (old, new)]
    if name != "by node":
        assert two_phases == [ranks > 2 for _, ranks in (before, after)] or before[0] > 1
    told = [record.message for record in caplog.records]
    taken_over = [message for message in told if "residuals of the means of" in message]
    assert len(taken_over) == (two_phases == [True, False])
    assert all("of 2 parameters" in message and "goes on with" in message for message in taken_over)
    new.round(7)
    # And on from there, to where it came from.
    again, new_residual = Run(strategy, *before, LARGE), new.new_residual()
    again.load(session_state.join_states(new.save()))
    for parameter in LARGE:
        torch.testing.assert_close(again.new_residual()[parameter], new_residual[parameter])


@pytest.mark.parametrize("told", [tacit.Flat(), tacit.TwoPhase()])
def test_a_checkpoint_follows_what_is_told_anew(told: Topology) -> None:
    """The same ranks, whose strategy left it open, and a choice that now falls otherwise."""
    strategy = UNDECIDED["int8"]
    old = trained(strategy, 1, 4, LARGE)
    assert old.topology == tacit.TwoPhase()
    new = Run(replace(strategy, topology=told), 1, 4, LARGE)
    for seat, mine in zip(new.seats, old.save(), strict=True):
        session_state.load(mine, strategy, [seat])
    new_residual = old.new_residual()
    for parameter in LARGE:
        torch.testing.assert_close(new.new_residual()[parameter], new_residual[parameter])


def test_what_means_owe_must_be_there_and_somebody_must_owe_it_on() -> None:
    strategy = STRATEGIES["efsign"]
    saved = session_state.join_states(trained(strategy, 1, 4, LARGE).save())
    key = f"shared/0/a/{SECOND}"
    run = Run(strategy, 1, 4, LARGE)
    with pytest.raises(CheckpointError, match=rf"lacks '{key}'"):
        run.load({k: v for k, v in saved.items() if k != key})
    bare = Run(tacit.Strategy(compressor=tacit.Sign(block=512)), 1, 4, LARGE)
    with pytest.raises(
        CheckpointError, match=r"residuals of the means of ., and its compressor here has none"
    ):
        session_state.load(saved, strategy, bare.seats[:1])


def test_what_is_kept_in_a_checkpoint_is_finite_and_of_who_compresses() -> None:
    saved = session_state.join_states(trained(STRATEGIES["efsign"], 1, 4, LARGE).save())
    assert {key for key in saved if key.endswith(SECOND)} == {f"shared/0/{name}/{SECOND}" for name in "ac"}
    assert all(bool(value.isfinite().all()) for value in saved.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("name", ["topk", "powersgd", "TopK by slices"])
def test_what_some_rank_owed_must_be_there(name: str) -> None:
    saved = trained(STRATEGIES[name], 2, 2).save()
    new = Run(STRATEGIES[name], 1, 2)
    before = [tensor.clone() for tensor in new.tensors()]
    for part in (saved[:1], saved[:2]):
        with pytest.raises(CheckpointError, match=r"what (rank|node)\d kept of .*/residual is not in it"):
            new.load(session_state.join_states(part))
    assert all(torch.equal(a, b) for a, b in zip(before, new.tensors(), strict=True))


def test_states_of_different_moments_are_not_joined() -> None:
    run = trained(STRATEGIES["topk"], 2, 1)
    early = run.save()
    run.round(5)
    with pytest.raises(CheckpointError, match=r"not of one moment: rounds is \[3\] in one and \[4\]"):
        session_state.join_states([early[0], run.save()[1]])
    with pytest.raises(CheckpointError, match="no states to join"):
        session_state.join_states([])


def test_another_strategy_is_named_beside_this_one() -> None:
    saved = trained(STRATEGIES["topk"], 2, 1).save()
    run = Run(STRATEGIES["sign"], 2, 1)
    with pytest.raises(CheckpointError, match="is of 'topk', and attached is 'sign'"):
        run.load(saved[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[object, dict[str, object]]]:
    """A folder of checkpoints that four processes have saved, and what they owed then."""
    folder = str(tmp_path_factory.mktemp("saved"))
    ended = ranks("resized_training.py", 4, "save", folder)
    assert [each.code for each in ended] == [0] * 4, ended[0].text
    return folder, {entry["name"]: entry for entry in ended[0].said}


@pytest.mark.parametrize(("world", "mode"), [(2, "files"), (2, "dcp"), (6, "files")])
def test_real_processes_go_on_in_another_number(
    world: int, mode: str, saved: tuple[str, dict[object, dict[str, object]]]
) -> None:
    folder, before = saved
    ended = ranks("resized_training.py", world, mode, folder)
    assert [each.code for each in ended] == [0] * world, ended[0].text
    assert "a checkpoint of 4 ranks goes on with" in ended[0].text
    assert len(ended[0].said) == len(before)
    for entry in ended[0].said:
        assert entry["equal"], entry
        assert entry["owed"] == pytest.approx(before[entry["name"]]["owed"], rel=1e-4, abs=1e-5), entry
        assert entry["rounds"] == before[entry["name"]]["rounds"] == 6
