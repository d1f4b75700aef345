"""What error feedback owes: in types of two bytes, while the learning rate changes, and of votes."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from laws import Bench
from torch import Tensor

import tacit
from tacit.compressors import (
    Dense,
    ErrorFeedback,
    Int8,
    MajoritySign,
    MomentumCorrection,
    OneBit,
    PowerSGD,
    RandomK,
    Select,
    Sign,
    TopK,
)
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Context, Matrix, Outcome, State, Topology
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies import Flat, Hierarchical, TwoPhase
from tacit.topologies.two_phase import SECOND
from tacit.transports.loopback import Loopback, Seat

N = 4000
MATRIX = Matrix(0, 40, 100)
HALF = [torch.bfloat16, torch.float16]
OWING = {
    "topk": ErrorFeedback(TopK(ratio=0.001)),
    "topk in int8": ErrorFeedback(TopK(ratio=0.01, values=Int8())),
    "randomk": ErrorFeedback(RandomK(ratio=0.001)),
    "sign": ErrorFeedback(Sign(block=512)),
    "onebit": ErrorFeedback(OneBit()),
    "int8": ErrorFeedback(Int8()),
    "powersgd": ErrorFeedback(PowerSGD(rank=1, matrices=(MATRIX,))),
    "select": Select(ErrorFeedback(TopK(ratio=0.01)), (Part(Dense(), ((100, 200),)),)),
}


def rounds(
    compressor: Compressor, given: Callable[[int, int], Tensor], count: int, peers: int = 2
) -> tuple[list[Tensor], list[State]]:
    """The means of so many rounds on a loopback, and what the ranks keep."""
    net = Loopback(peers)
    states = [compressor.init(given(0, rank)) for rank in range(peers)]
    means = []
    for round_ in range(count):
        xs = [given(round_, rank) for rank in range(peers)]
        talks = []
        for rank, (x, state) in enumerate(zip(xs, states, strict=True)):
            ctx = Context(
                out=torch.empty_like(x),
                work=Bench(),
                peers=peers,
                rank=rank,
                round=round_,
                step=round_,
                name="x",
            )
            talks.append(Flat().conduct(x, compressor, state, ctx))
        done: list[Outcome] = net.run(talks)
        states = [outcome.state for outcome in done]
        means.append(done[0].mean.clone())
    return means, states


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OWING)
def test_in_two_bytes_nothing_small_is_lost_round_after_round(name: str, dtype: torch.dtype) -> None:
    # A gradient that stays the same: what is owed of an entry grows to hundreds of times what is added.
    generator = torch.Generator().manual_seed(0)
    g = (torch.rand(N, generator=generator) * 0.5 + 0.75).to(dtype) * 0.01
    count = 600
    means, states = rounds(OWING[name], lambda round_, rank: g.clone(), count)
    arrived = torch.stack(means).double().sum(0)
    owed = torch.stack([_residual(state) for state in states]).double().mean(0)
    true = g.double() * count
    lost = float((arrived + owed - true).norm() / true.norm())
    # What a payload says is rounded to the type, and what is left is owed in fp32: no more than a rounding.
    assert lost < (2e-2 if name == "powersgd" else 4e-3), lost


def _residual(state: State) -> Tensor:
    (found,) = [value for field, value in state.items() if field.rpartition(".")[2] == "residual"]
    assert found.dtype == torch.float32
    return found


@pytest.mark.parametrize("dtype", HALF)
def test_momentum_in_two_bytes_follows_fp32(dtype: torch.dtype) -> None:
    def moved(dtype: torch.dtype) -> Tensor:
        compressor = MomentumCorrection(ErrorFeedback(TopK(ratio=0.05)), masking=False)
        g = torch.full((200,), 0.0123).to(dtype)
        means, states = rounds(compressor, lambda round_, rank: g.clone(), 400)
        assert states[0]["velocity"].dtype == torch.float32
        return torch.stack(means).double().sum(0) + states[0]["inner.residual"].double()

    half, full = moved(dtype), moved(torch.float32)
    torch.testing.assert_close(half, full, rtol=1e-2, atol=0.0)


# ---- the learning rate --------------------------------------------------------------------------------

NAMED = {"a": torch.zeros(60, 100), "b": torch.zeros(100), "c": torch.zeros(50, 80)}
RATES = [0.0, 0.01, 0.02, 0.05, 0.1, 0.1, 0.1, 0.07, 0.03, 0.01, 0.003]
WAYS = {
    "flat": (Flat(), Loopback(3)),
    "two phases": (TwoPhase(), Loopback(3)),
    "slices": (Hierarchical(far=Flat("net")), Loopback.of_nodes(2, 2)),
    "slices, two phases": (Hierarchical(far=TwoPhase("net")), Loopback.of_nodes(3, 2)),
}


class Trained:
    """Sessions on a loopback, whose answers are applied at learning rates that change."""

    def __init__(
        self,
        compressor: Compressor,
        rates: Callable[[int], Mapping[str, float]],
        topology: Topology = WAYS["flat"][0],
        net: Loopback = WAYS["flat"][1],
    ) -> None:
        self.net, self.rates, self.step = net, rates, 0
        self.sessions = [
            Session(
                Strategy(compressor=compressor, topology=topology),
                NAMED,
                Seat(net, rank),
                [["c", "b", "a"]],
                rates=lambda: rates(self.step),
            )
            for rank in range(net.world)
        ]
        self.given = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        self.moved = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            lot = self.sessions[0].lots[0]
            xs = [torch.randn(lot.numel, generator=generator) for _ in self.sessions]
            true = torch.stack(xs).mean(0)
            done = self.net.run([s.open(0, x) for s, x in zip(self.sessions, xs, strict=True)])
            for session, outcome in zip(self.sessions, done, strict=True):
                session.land(0, outcome)
                session.step += 1
            rates = self.rates(self.step)
            for slot in lot.slots:
                span = slice(slot.start, slot.stop)
                self.given[slot.name] += rates[slot.name] * true[span]
                self.moved[slot.name] += rates[slot.name] * xs[0][span]
            self.step += 1

    def owed(self, rates: Mapping[str, float]) -> dict[str, Tensor]:
        """What the parameters have still to move by, at these rates."""
        total = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        units = len(self.sessions[0].transport.nodes) or len(self.sessions)
        for session in self.sessions:
            for (name, field), kept in session.named_state().items():
                share = 1.0 if field == SECOND else 1 / units if field.endswith("residual") else 0.0
                span = slice(kept.start, kept.start + kept.tensor.numel())
                total[name][span] += rates[name] * share * kept.tensor
        return total


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "compressor",
    [TopK(ratio=0.02), Sign(block=512), Int8(), RandomK(ratio=0.05)],
    ids=["topk", "sign", "int8", "rk"],
)
def test_what_is_owed_is_a_step_of_the_parameters(compressor: Compressor, way: str) -> None:
    def rates(step: int) -> dict[str, float]:
        # Two groups with schedules of their own in one lot; one of them frozen at first.
        return {"a": RATES[step], "b": RATES[step], "c": 0.0 if step < 3 else 0.05 / step}

    trained = Trained(ErrorFeedback(compressor), rates, *WAYS[way])
    trained.run(len(RATES))
    for name, owed in trained.owed(rates(len(RATES) - 1)).items():
        # What was given at a rate of 0 moves nothing, and is not owed.
        torch.testing.assert_close(trained.moved[name] + owed, trained.given[name], rtol=1e-3, atol=2e-3)


def test_without_it_what_is_owed_grows_and_shrinks_with_the_rate() -> None:
    def rates(step: int) -> dict[str, float]:
        return dict.fromkeys(NAMED, 0.1 / 2**step)

    def missing(compressor: Compressor) -> float:
        trained = Trained(compressor, rates)
        trained.run(6)
        owed = trained.owed(rates(5))["a"]
        return float((trained.moved["a"] + owed - trained.given["a"]).norm() / trained.given["a"].norm())

    assert missing(ErrorFeedback(TopK(ratio=0.02))) < 1e-4
    assert missing(ErrorFeedback(TopK(ratio=0.02), rescale=False)) > 0.3


def test_a_rate_that_hardly_changes_costs_nothing_until_it_has() -> None:
    def rates(step: int) -> dict[str, float]:
        return dict.fromkeys(NAMED, 0.1 * 0.999**step)

    trained = Trained(ErrorFeedback(TopK(ratio=0.02)), rates)
    rescaling = trained.sessions[0].rescaling
    assert rescaling is not None
    changed = []
    for _ in range(60):
        changed.append(bool(rescaling.changes()))
        trained.run(1)
    # Every 21st step: 0.999^20 is above 0.98, 0.999^21 below.
    assert [step for step, each in enumerate(changed) if each] == [21, 42]


def test_at_the_end_of_a_schedule_what_is_owed_stays_finite() -> None:
    def rates(step: int) -> dict[str, float]:
        return dict.fromkeys(NAMED, 0.1 * 10.0**-step)

    trained = Trained(ErrorFeedback(TopK(ratio=0.02)), rates)
    trained.run(12)
    (residual,) = [v.tensor for (name, _), v in trained.sessions[0].named_state().items() if name == "a"]
    assert float(residual.abs().max()) < 1e5


def test_while_the_rate_is_zero_the_units_stay() -> None:
    def owed(rates: list[float]) -> Tensor:
        trained = Trained(ErrorFeedback(Sign(block=512)), lambda step: dict.fromkeys(NAMED, rates[step]))
        trained.run(3)
        return trained.owed(dict.fromkeys(NAMED, 1.0))["a"]

    assert torch.equal(owed([0.1, 0.0, 0.1]), owed([0.1, 0.1, 0.1]))


def test_a_failed_round_does_not_rescale() -> None:
    def trained_with(fails: bool) -> Trained:
        rates = [0.1, 0.05, 0.05]
        trained = Trained(ErrorFeedback(TopK(ratio=0.02)), lambda step: dict.fromkeys(NAMED, rates[step]))
        trained.run(1)
        if fails:
            xs = [torch.randn(10_100) for _ in trained.sessions]
            trained.net.run([s.open(0, x) for s, x in zip(trained.sessions, xs, strict=True)])
            for session in trained.sessions:
                session.discard()
        trained.run(2)
        return trained

    one, other = trained_with(False), trained_with(True)
    assert all(torch.equal(one.moved[name], other.moved[name]) for name in NAMED)


# ---- votes --------------------------------------------------------------------------------------------


def votes(xs: list[Tensor], round_: int = 0) -> Tensor:
    means, _ = rounds_at(MajoritySign(), xs, round_)
    return means


def rounds_at(compressor: Compressor, xs: list[Tensor], round_: int) -> tuple[Tensor, None]:
    peers, net, talks = len(xs), Loopback(len(xs)), []
    for rank, x in enumerate(xs):
        ctx = Context(out=torch.empty_like(x), work=Bench(), peers=peers, rank=rank, name="x")
        ctx = replace(ctx, round=round_, step=round_)
        talks.append(Flat().conduct(x.clone(), compressor, {}, ctx))
    done = net.run(talks)
    assert all(torch.equal(each.mean, done[0].mean) for each in done)
    return done[0].mean, None


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7])
def test_rows_that_nobody_has_used_stay_where_they_are(peers: int) -> None:
    generator = torch.Generator().manual_seed(peers)
    xs = [torch.randn(70, 64, generator=generator) for _ in range(peers)]
    for rank, x in enumerate(xs):
        x[10:20] = 0
        x[30 + rank] = 0  # of these another rank has an opinion, where there is one
    moved = votes([x.view(-1) for x in xs]).view(70, 64)
    assert not bool(moved[10:20].any())
    assert not bool(moved[30].any()) if peers == 1 else bool(moved[30].any())
    others = torch.stack(xs).sign().sum(0).sign()
    assert torch.equal(moved, others)


@pytest.mark.parametrize("numel", [1, 7, 63, 64, 65, 1000, 16_384, 16_385, 40_001])
def test_single_zeros_do_not_drift(numel: int) -> None:
    def single(rank: int) -> Tensor:
        x = torch.ones(numel) if numel > 1 else torch.zeros(1)
        x[::2] = 0
        return x

    even = votes([single(rank) for rank in range(4)])
    assert not bool(even[::2].any()), "of two ranks one votes for and one against"
    assert bool((even[1::2] == 1).all())
    odd = torch.stack([votes([single(rank) for rank in range(3)], round_) for round_ in range(2)])
    assert not bool(odd.sum(0)[::2].any()), "what one round moves the next one moves back"


def test_zeros_among_votes_leave_the_others_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50_000, generator=generator)
    x[torch.randperm(50_000, generator=generator)[:5000]] = 0
    said = votes([x])
    assert torch.equal(said[x != 0], x[x != 0].sign())
    zeros = said[x == 0]
    assert 0.4 < float((zeros > 0).float().mean()) < 0.6


def test_what_is_refused() -> None:
    for bad in (1, None, "yes"):
        with pytest.raises(tacit.ConfigError, match="rescale"):
            ErrorFeedback(TopK(), rescale=bad)  # type: ignore[arg-type]
