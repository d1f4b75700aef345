"""The laws that every compressor obeys, whatever it is made of."""

import dataclasses

import pytest
import torch
from laws import Peers, tensors
from table import NUMEL, TABLE, Row

import tacit.compressors
import tacit.prediction
from cases import for_each
from tacit.compressors import InParts, PowerSGD, RandomK, Sign
from tacit.compressors.wrappers import ErrorFeedback, Part, Partition
from tacit.contracts import AxisRank, Context, Matrix, MixingCompressor
from tacit.prediction.predictor import AnswerPredictor
from tacit.transports.meter import DryRun, run_dry

every_row = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
every_mean = pytest.mark.parametrize(
    "row", [r for r in TABLE.values() if not r.steps], ids=[n for n, r in TABLE.items() if not r.steps]
)
every_world = for_each("peers", [1, 2, 3, 4, 7])


def test_every_compressor_has_a_row() -> None:
    def inside(value: object) -> set[type]:
        found = {type(value)}
        for each in (getattr(value, f.name) for f in dataclasses.fields(value)):  # type: ignore[arg-type]
            for part in each if isinstance(each, tuple) else [each]:
                if dataclasses.is_dataclass(part):
                    found |= inside(part)
        return found

    covered = set().union(*(inside(row.compressor) for row in TABLE.values())) - {Part, Matrix}
    covered = {kind for kind in covered if not issubclass(kind, AnswerPredictor)}
    served = {tacit.prediction.Pulled}  # it has no peers but a server: tests/server/test_pulled.py
    every = {getattr(tacit.compressors, name) for name in tacit.compressors.__all__}
    # Each rank has an answer of its own: tests/topologies hold them to their papers' lines.
    every = {kind for kind in every if not issubclass(kind, MixingCompressor)}
    every |= {
        tacit.prediction.Nowcast,
        tacit.prediction.Predicted,
        tacit.prediction.PredictiveCoding,
    } | served
    assert covered | served == every


@every_row
@every_world
def test_all_ranks_agree_bit_for_bit(row: Row, peers: int) -> None:
    group = Peers(row.compressor, peers, NUMEL, row.topology)
    for seed in range(3):
        first, *others = group.exchange(tensors(peers, NUMEL, seed))
        assert all(torch.equal(first.mean, other.mean) for other in others)
        assert bool(first.mean.isfinite().all())


@every_mean
@every_world
def test_the_mean_is_the_mean_of_what_was_sent(row: Row, peers: int) -> None:
    outcomes = Peers(row.compressor, peers, NUMEL, row.topology).exchange(tensors(peers, NUMEL))
    sent = torch.stack([outcome.sent.dense(outcome.mean) for outcome in outcomes])
    expected = sent.sum(0).sign() if row.votes else sent.mean(0)
    error = (outcomes[0].mean - expected).abs()
    assert bool((error <= row.rounding * sent.abs().mean(0) + 1e-6).all())


@every_mean
def test_the_error_of_one_round_is_bounded(row: Row) -> None:
    xs = tensors(4, NUMEL)
    mean = Peers(row.compressor, 4, NUMEL, row.topology).exchange(xs)[0].mean
    exact = torch.stack(xs).mean(0)
    assert float((mean - exact).abs().max()) <= row.error * max(float(x.abs().max()) for x in xs)


@every_row
def test_nothing_given_is_changed(row: Row) -> None:
    xs = tensors(3, NUMEL)
    group = Peers(row.compressor, 3, NUMEL, row.topology)
    group.exchange(tensors(3, NUMEL, seed=1))
    states = group.states
    before = [x.clone() for x in xs], [{k: v.clone() for k, v in state.items()} for state in states]
    group.exchange(xs)
    assert all(torch.equal(x, old) for x, old in zip(xs, before[0], strict=True))
    for state, old in zip(states, before[1], strict=True):
        assert all(torch.equal(state[k], old[k]) for k in old)


@every_row
def test_in_place_gives_the_same_mean(row: Row) -> None:
    apart, in_place = (
        Peers(row.compressor, 3, NUMEL, row.topology),
        Peers(row.compressor, 3, NUMEL, row.topology),
    )
    for seed in range(3):
        a = apart.exchange(tensors(3, NUMEL, seed))[0].mean
        b = in_place.exchange(tensors(3, NUMEL, seed), in_place=True)[0].mean
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "row", [r for r in TABLE.values() if r.conserves], ids=[n for n, r in TABLE.items() if r.conserves]
)
def test_error_feedback_loses_nothing(row: Row) -> None:
    group = Peers(row.compressor, 3, NUMEL, row.topology)
    given, arrived = torch.zeros(3, NUMEL, dtype=torch.float64), torch.zeros(3, NUMEL, dtype=torch.float64)
    for seed in range(20):
        xs = tensors(3, NUMEL, seed)
        given += torch.stack(xs)
        arrived += torch.stack([o.sent.dense(o.mean) for o in group.exchange(xs)])
    (new_residual,) = {field for field in group.states[0] if field.removeprefix("inner.") == "residual"}
    residual = torch.stack([state[new_residual] for state in group.states])
    torch.testing.assert_close(arrived + residual, given, rtol=1e-5, atol=1e-4)


@every_row
@every_world
def test_bytes_equal_the_formula(row: Row, peers: int) -> None:
    group = Peers(row.compressor, peers, NUMEL, row.topology)
    group.exchange(tensors(peers, NUMEL))
    if row.varies:
        assert all(a <= b for a, b in zip(group.net.sent, row.bytes(peers), strict=True))
        whole = isinstance(row.compressor, ErrorFeedback) and isinstance(row.compressor.inner, InParts)
        assert whole or peers == 1 or sum(group.net.sent) < sum(row.bytes(peers))
    else:
        assert group.net.sent == row.bytes(peers)


@every_row
@every_world
def test_the_meter_foretells_bytes_and_state(row: Row, peers: int) -> None:
    x = torch.empty(NUMEL, device="meta")
    state = row.compressor.init(x)
    costs = []
    for rank in range(peers):
        ctx = Context(out=x, work=DryRun(), peers=peers, rank=rank, name="bucket")
        talk = row.topology.conduct(x, row.compressor, state, ctx)
        outcome, cost = run_dry(talk, lambda _, rank=rank: AxisRank(rank, peers))
        costs.append(cost)
    assert [sum(cost.sent.values()) for cost in costs] == row.bytes(peers)
    assert all(cost.stages == costs[0].stages for cost in costs)
    real = Peers(row.compressor, peers, NUMEL, row.topology)
    real.exchange(tensors(peers, NUMEL))
    assert {k: v.shape for k, v in outcome.state.items()} == {k: v.shape for k, v in real.states[0].items()}


@every_row
def test_a_compressor_is_a_value(row: Row) -> None:
    homes = (tacit.compressors, tacit.prediction)
    names = {name: getattr(home, name) for home in homes for name in home.__all__}
    names |= {"Part": Part, "Matrix": Matrix}
    again = eval(repr(row.compressor), names)
    assert again == row.compressor
    assert hash(again) == hash(row.compressor)


def test_nothing_is_remembered_of_others_spans() -> None:
    compressor = Partition(ErrorFeedback(Sign()), (Part(tacit.compressors.Dense(), ((3, 7),)),))
    group = Peers(compressor, 2, NUMEL)
    group.exchange(tensors(2, NUMEL))
    for state in group.states:
        assert not bool(state["main.residual"][3:7].any())
        assert bool(state["main.residual"][7:].all())


def test_state_of_parts_is_kept_apart() -> None:
    ef = ErrorFeedback(tacit.compressors.TopK(ratio=0.1))
    state = Partition(ef, (Part(ef, ((0, 10),)),)).init(torch.empty(100))
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "main.residual": (100,),
        "part0.residual": (10,),
    }


def test_powersgd_of_full_rank_is_exact() -> None:
    compressor = PowerSGD(rank=10, matrices=(Matrix(0, 10, 40),))
    xs = tensors(4, 400)
    mean = Peers(compressor, 4, 400).exchange(xs)[0].mean
    torch.testing.assert_close(mean, torch.stack(xs).mean(0), rtol=1e-4, atol=1e-4)


def test_powersgd_follows_a_low_rank_matrix_by_its_warm_start() -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(30, 2, generator=generator) @ torch.randn(2, 50, generator=generator)).view(-1)
    group = Peers(PowerSGD(rank=2, matrices=(Matrix(0, 30, 50),)), 2, 1500)
    for _ in range(3):
        mean = group.exchange([x.clone(), x.clone()])[0].mean
    torch.testing.assert_close(mean, x, rtol=1e-4, atol=1e-4)


def test_powersgd_survives_a_zero_gradient() -> None:
    group = Peers(PowerSGD(rank=2, matrices=(Matrix(0, 10, 20),)), 2, 200)
    mean = group.exchange([torch.zeros(200), torch.zeros(200)])[0].mean
    assert torch.equal(mean, torch.zeros(200))


def test_random_entries_scaled_up_are_unbiased() -> None:
    x = tensors(1, NUMEL)[0]
    group = Peers(RandomK(ratio=0.1, unbiased=True), 1, NUMEL)
    draws = torch.stack([group.exchange([x.clone()])[0].mean.clone() for _ in range(2000)])
    # Each entry is 10 x with probability 0.1: deviation 3 |x|, of the mean of 2000 draws 0.067 |x|.
    error = (draws.mean(0) - x).abs() / x.abs()
    assert float(error.max()) < 6 * 0.067
    assert float(error.mean()) < 0.067


def test_signs_take_one_bit() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 0.0, -1.0, 5.0, -2.0, 2.0, -4.0])
    (outcome,) = Peers(Sign(), 1, 9).exchange([x])
    assert outcome.mean.tolist() == pytest.approx([20 / 9 * s for s in (1, -1, 1, 1, -1, 1, -1, 1, -1)])
