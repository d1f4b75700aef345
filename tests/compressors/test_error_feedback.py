"""What error feedback owes: in types of two bytes, while the learning rate changes, and of votes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import FLAT, Bench
from torch import Tensor

import tacit
from cases import for_each
from tacit.checkpoint.session_state import load, saved
from tacit.compressors import (
    Clip,
    Dense,
    ErrorFeedback,
    Int8,
    MajoritySign,
    MomentumCorrection,
    OneBit,
    Partition,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Context, Matrix, Outcome, State, Topology
from tacit.errors import ConfigError
from tacit.session import Session, Training
from tacit.strategy import Strategy
from tacit.topologies import Flat, GlobalTopK, Hierarchical, TwoPhase
from tacit.topologies.two_phase import SECOND
from tacit.transports.loopback import Loopback, LoopbackTransport

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
    "select": Partition(ErrorFeedback(TopK(ratio=0.01)), (Part(Dense(), ((100, 200),)),)),
    "gtopk": ErrorFeedback(TopK(ratio=0.01)),
}
MERGED: dict[str, Topology] = {"gtopk": GlobalTopK()}
"""What does not go by `Flat`."""


def rounds(
    compressor: Compressor,
    given: Callable[[int, int], Tensor],
    count: int,
    peers: int = 2,
    topology: Topology = FLAT,
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
            talks.append(topology.conduct(x, compressor, state, ctx))
        done: list[Outcome] = net.run(talks)
        states = [outcome.state for outcome in done]
        means.append(done[0].mean.clone())
    return means, states


@for_each("dtype", HALF)
@pytest.mark.parametrize("name", OWING)
def test_in_two_bytes_nothing_small_is_lost_round_after_round(name: str, dtype: torch.dtype) -> None:
    # A gradient that stays the same: what is owed of an entry grows to hundreds of times what is added.
    generator = torch.Generator().manual_seed(0)
    gs = [(torch.rand(N, generator=generator) * 0.5 + 0.75).to(dtype) * 0.01 for _ in range(2)]
    # Where each entry is sent every hundredth round, it takes longer until fp16 alone would lose too much.
    count = 600 if name in ("topk in int8", "select") else 300
    topology = MERGED.get(name, FLAT)
    means, states = rounds(OWING[name], lambda round_, rank: gs[rank].clone(), count, topology=topology)
    arrived = torch.stack(means).double().sum(0)
    new_residual = torch.stack([_residual(state) for state in states]).double().mean(0)
    true = torch.stack(gs).double().mean(0) * count
    lost = float((arrived + new_residual - true).norm() / true.norm())
    # What a payload says is rounded to the type, and what is left is owed in fp32: no more than a rounding.
    assert lost < (2e-2 if name == "powersgd" else 4e-3), lost


@pytest.mark.parametrize("dtype", HALF)
def test_of_what_a_merge_rejects_not_even_the_rounding_is_lost(dtype: torch.dtype) -> None:
    # No two ranks have the same entries, so that a merge rounds nothing.
    given = (torch.rand(400, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype) * 0.01
    gs = [torch.where(torch.arange(400) % 2 == rank, given, 0.0) for rank in range(2)]
    compressor = ErrorFeedback(TopK(ratio=0.01))
    means, states = rounds(compressor, lambda _, rank: gs[rank].clone(), 200, topology=GlobalTopK())
    arrived = torch.stack(means).double().sum(0)
    new_residual = torch.stack([_residual(state) for state in states]).double().mean(0)
    torch.testing.assert_close(arrived + new_residual, given.double() / 2 * 200, rtol=1e-5, atol=0.0)


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


def always(rank: int, step: int, name: str) -> bool:
    """Every rank uses every parameter in every step."""
    return True


class Trained:
    """Sessions on a loopback, whose answers are applied at learning rates that change.

    As DDP with `find_unused_parameters` does, nothing is applied to a parameter that no rank has `used`.
    """

    def __init__(
        self,
        compressor: Compressor,
        rates: Callable[[int], Mapping[str, float]],
        topology: Topology = WAYS["flat"][0],
        net: Loopback = WAYS["flat"][1],
        used: Callable[[int, int, str], bool] = always,
    ) -> None:
        self.net, self.rates, self.used, self.step = net, rates, used, 0
        self.strategy = Strategy(compressor=compressor, topology=topology)
        self.sessions = [
            Session(
                self.strategy,
                NAMED,
                LoopbackTransport(net, rank),
                [["c", "b", "a"]],
                training=Training(
                    rates=lambda: rates(self.step),
                    idle=None if used is always else lambda name, rank=rank: not used(rank, self.step, name),
                ),
            )
            for rank in range(net.world)
        ]
        self.given = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        self.moved = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            bucket = self.sessions[0].buckets[0]
            xs = [torch.randn(bucket.numel, generator=generator) for _ in self.sessions]
            for rank, x in enumerate(xs):
                for slot in bucket.slices:
                    x[slot.start : slot.stop] *= self.used(rank, self.step, slot.name)
            true = torch.stack(xs).mean(0)
            speed = self._speed()
            done = self.net.run([s.open(0, x) for s, x in zip(self.sessions, xs, strict=True)])
            for session, outcome in zip(self.sessions, done, strict=True):
                session.complete(0, outcome)
                session.advance()
            rates = self.rates(self.step)
            for slot in bucket.slices:
                span = slice(slot.start, slot.stop)
                if any(self.used(rank, self.step, slot.name) for rank in range(self.net.world)):
                    self.given[slot.name] += rates[slot.name] * (true[span] + speed[slot.name])
                    self.moved[slot.name] += rates[slot.name] * xs[0][span]
            self.step += 1

    def _speed(self) -> dict[str, Tensor]:
        """What momentum adds to the mean gradient of a step."""
        momentum = self.strategy.compressor.takes_momentum
        total = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        for session in self.sessions if momentum is not None else ():
            for (name, field), kept in session.store.named_state().items():
                if field == "velocity":
                    span = slice(kept.start, kept.start + kept.tensor.numel())
                    total[name][span] += momentum.factor / self._units * kept.tensor
        return total

    @property
    def _units(self) -> int:
        """How many keep a share each of what is owed: the ranks, or by node, the nodes."""
        return len(self.sessions[0].transport.nodes) or len(self.sessions)

    def save(self) -> list[dict[str, Any]]:
        wholes = self.net.run([session.store.gathered() for session in self.sessions])
        each = zip(self.sessions, wholes, strict=True)
        return [saved(self.strategy, [_alone(session)], [whole]) for session, whole in each]

    def resume(self, step: int, saved: list[dict[str, Any]]) -> None:
        self.step = step
        for session, mine in zip(self.sessions, saved, strict=True):
            load(mine, self.strategy, [_alone(session)])

    def new_residual(self, rates: Mapping[str, float]) -> dict[str, Tensor]:
        """What the parameters have still to move by, at these rates."""
        total = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        for session in self.sessions:
            for (name, field), kept in session.store.named_state().items():
                share = 1.0 if field == SECOND else 1 / self._units if field.endswith("residual") else 0.0
                span = slice(kept.start, kept.start + kept.tensor.numel())
                total[name][span] += rates[name] * share * kept.tensor
        return total


def _alone(session: Session) -> Any:
    """A level that has nothing to keep but this."""
    return SimpleNamespace(session=session, gradient=None, progress=None, taken=None)


@for_each("way", WAYS)
@for_each(
    "compressor",
    [TopK(ratio=0.02), Sign(block=512), Int8(), RandomK(ratio=0.05)],
    ids=["topk", "sign", "int8", "rk"],
)
def test_what_is_owed_is_a_step_of_the_parameters(compressor: Compressor, way: str) -> None:
    def rates(step: int) -> dict[str, float]:
        # Two groups with schedules of their own in one bucket; one of them frozen at first.
        return {"a": RATES[step], "b": RATES[step], "c": 0.0 if step < 3 else 0.05 / step}

    trained = Trained(ErrorFeedback(compressor), rates, *WAYS[way])
    trained.run(len(RATES))
    for name, new_residual in trained.new_residual(rates(len(RATES) - 1)).items():
        # What was given at a rate of 0 moves nothing, and is not owed.
        torch.testing.assert_close(
            trained.moved[name] + new_residual, trained.given[name], rtol=1e-3, atol=2e-3
        )


SELDOM = {
    "topk": ErrorFeedback(TopK(ratio=0.02)),
    "sign": ErrorFeedback(Sign(block=512)),
    "powersgd": ErrorFeedback(PowerSGD(rank=1)),
    "dgc": MomentumCorrection(ErrorFeedback(TopK(ratio=0.02))),
    "dgc, without masking": MomentumCorrection(ErrorFeedback(TopK(ratio=0.02)), masking=False),
}


@for_each("way", WAYS)
@for_each("name", SELDOM)
def test_of_a_parameter_that_is_used_now_and_then_nothing_is_lost(name: str, way: str) -> None:
    def rates(step: int) -> dict[str, float]:
        return dict.fromkeys(NAMED, 0.1 if step < 4 else 0.05)

    def used(rank: int, step: int, name: str) -> bool:
        # One by all ranks in every third step, another by rank 1 alone in the steps between.
        return {"a": step % 3 == 0, "b": True, "c": rank == 1 and step % 3 != 0}[name]

    trained = Trained(SELDOM[name], rates, *WAYS[way], used)
    trained.run(9)
    for parameter, new_residual in trained.new_residual(rates(8)).items():
        given, moved = trained.given[parameter], trained.moved[parameter]
        torch.testing.assert_close(moved + new_residual, given, rtol=1e-3, atol=2e-3)
        assert float(given.abs().max()) > 0.1


@pytest.mark.parametrize("name", SELDOM)
def test_what_is_kept_of_a_parameter_that_nobody_uses_stays_as_it_is(name: str) -> None:
    def kept() -> list[Tensor]:
        each = [session.store.named_state().items() for session in trained.sessions]
        return [value.tensor.clone() for fields in each for (of, _), value in fields if of == "a"]

    trained = Trained(
        SELDOM[name],
        lambda step: dict.fromkeys(NAMED, 0.1 / (1 + step)),
        used=lambda _, step, name: name != "a" or step < 2,
    )
    trained.run(2)
    before = kept()
    assert any(bool(each.any()) for each in before)
    trained.run(3)
    assert all(torch.equal(one, other) for one, other in zip(before, kept(), strict=True))


def test_without_it_what_is_owed_grows_and_shrinks_with_the_rate() -> None:
    def rates(step: int) -> dict[str, float]:
        return dict.fromkeys(NAMED, 0.1 / 2**step)

    def missing(compressor: Compressor) -> float:
        trained = Trained(compressor, rates)
        trained.run(6)
        new_residual = trained.new_residual(rates(5))["a"]
        return float(
            (trained.moved["a"] + new_residual - trained.given["a"]).norm() / trained.given["a"].norm()
        )

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
        changed.append(bool(rescaling.changes(rates(trained.step))))
        trained.run(1)
    # Every 21st step: 0.999^20 is above 0.98, 0.999^21 below.
    assert [step for step, each in enumerate(changed) if each] == [21, 42]


def test_at_the_end_of_a_schedule_what_is_owed_stays_finite() -> None:
    def rates(step: int) -> dict[str, float]:
        return dict.fromkeys(NAMED, 0.1 * 10.0**-step)

    trained = Trained(ErrorFeedback(TopK(ratio=0.02)), rates)
    trained.run(12)
    (residual,) = [
        v.tensor for (name, _), v in trained.sessions[0].store.named_state().items() if name == "a"
    ]
    assert float(residual.abs().max()) < 1e5


def test_while_the_rate_is_zero_the_units_stay() -> None:
    def new_residual(rates: list[float]) -> Tensor:
        trained = Trained(ErrorFeedback(Sign(block=512)), lambda step: dict.fromkeys(NAMED, rates[step]))
        trained.run(3)
        return trained.new_residual(dict.fromkeys(NAMED, 1.0))["a"]

    assert torch.equal(new_residual([0.1, 0.0, 0.1]), new_residual([0.1, 0.1, 0.1]))


@pytest.mark.parametrize("way", ["flat", "slices, two phases"])
@pytest.mark.parametrize(
    "rates",
    [
        [0.1, 0.1, 0.1, 0.04, 0.04, 0.02],
        [0.1, 0.1, 0.0985, 0.0975, 0.0965, 0.0955],  # too little to rescale, and then enough
        [0.1, 0.1, 0.1, 0.0, 0.05, 0.05],
        [0.1, 1e-3, 1e-5, 1e-6, 1e-6, 0.1],  # below what counts of the largest, which was before
    ],
)
def test_a_run_that_is_resumed_between_two_rates_is_the_run_that_never_stopped(
    rates: list[float], way: str
) -> None:
    def start() -> Trained:
        return Trained(
            ErrorFeedback(TopK(ratio=0.02)), lambda step: dict.fromkeys(NAMED, rates[step]), *WAYS[way]
        )

    straight, stopped = start(), start()
    straight.run(3)
    stopped.resume(3, straight.save())
    before = {name: moved.clone() for name, moved in straight.moved.items()}
    for trained in (straight, stopped):
        trained.run(3)
    for name, moved in stopped.moved.items():
        torch.testing.assert_close(straight.moved[name] - before[name], moved, rtol=1e-5, atol=1e-6)
    last = dict.fromkeys(NAMED, rates[-1])
    for name, new_residual in stopped.new_residual(last).items():
        assert torch.equal(new_residual, straight.new_residual(last)[name]), name


def test_a_failed_round_does_not_rescale() -> None:
    def trained_with(fails: bool) -> Trained:
        rates = [0.1, 0.05, 0.05]
        trained = Trained(ErrorFeedback(TopK(ratio=0.02)), lambda step: dict.fromkeys(NAMED, rates[step]))
        trained.run(1)
        if fails:
            xs = [torch.randn(10_100) for _ in trained.sessions]
            trained.net.run([s.open(0, x) for s, x in zip(trained.sessions, xs, strict=True)])
            for session in trained.sessions:
                session.pending.begin_anew()
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


@for_each("numel", [1, 7, 63, 64, 65, 1000, 16_384, 16_385, 40_001])
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


# ---- what is owed decays ------------------------------------------------------------------------------


def test_what_is_owed_decays_as_sparseloco_has_it() -> None:
    """Sarfi et al. 2025: m = beta m + delta; the largest of each chunk leave m; their mean arrives."""
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(N, generator=generator) for _ in range(2)] for _ in range(5)]
    compressor = ErrorFeedback(TopK(ratio=0.01, chunk=500), decay=0.95)
    means, states = rounds(compressor, lambda round_, rank: given[round_][rank].clone(), 5)
    new_residual = [torch.zeros(N) for _ in range(2)]
    for deltas, mean in zip(given, means, strict=True):
        sent = []
        for m, delta in zip(new_residual, deltas, strict=True):
            m.mul_(0.95).add_(delta)
            rows = m.view(-1, 500)
            chosen = torch.zeros_like(rows).scatter_(1, rows.abs().topk(5).indices, 1.0).view(-1)
            sent.append(m * chosen)
            m.mul_(1 - chosen)
        torch.testing.assert_close(mean, torch.stack(sent).mean(0))
    assert all(torch.equal(_residual(state), m) for state, m in zip(states, new_residual, strict=True))


@pytest.mark.parametrize("inner", [TopK(ratio=0.01), Clip(TopK(ratio=0.01), 1e9)], ids=["once", "inside"])
@pytest.mark.parametrize("rescale", [True, False])
def test_decay_comes_on_top_of_the_learning_rate(inner: Compressor, rescale: bool) -> None:
    before = torch.randn(N, generator=torch.Generator().manual_seed(0))
    compressor = ErrorFeedback(inner, rescale=rescale, decay=0.5)
    x = torch.zeros(N)
    factors = ((100, 200, 4.0), (3000, N, 2.0))
    ctx = Context(out=torch.empty(N), work=Bench(), peers=1, name="x", rescale=factors)
    talk = FLAT.conduct(x, compressor, {"residual": before}, ctx)
    (done,) = Loopback(1).run([talk])
    expected = before.clone()
    for start, stop, factor in factors if rescale else ():
        expected[start:stop] *= factor
    torch.testing.assert_close(done.mean + done.state["residual"], expected * 0.5)
    torch.testing.assert_close(done.sent.dense(x), done.mean)


def test_what_the_means_owe_decays_too() -> None:
    compressor, topology = ErrorFeedback(TopK(ratio=0.01), decay=0.5), TwoPhase()
    before = [torch.randn(2048, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    x = torch.zeros(4096)
    talks = []
    for rank, second in enumerate(before):
        ctx = Context(out=torch.empty(4096), work=Bench(), peers=2, rank=rank, name="x")
        talks.append(topology.conduct(x, compressor, {**compressor.init(x), SECOND: second}, ctx))
    for rank, done in enumerate(Loopback(2).run(talks)):
        arrived = done.mean.view(2, -1)[rank] + done.state[SECOND]
        torch.testing.assert_close(arrived, before[rank] * 0.5)
        assert int(done.mean.count_nonzero()) == 2 * 21


@pytest.mark.parametrize("decay", [0, -0.5, 1.5, True, "0.9"])
def test_a_decay_that_is_none_is_refused(decay: object) -> None:
    with pytest.raises(ConfigError, match=r"decay=.* is not .*0\.95"):
        ErrorFeedback(Dense(), decay=decay)  # type: ignore[arg-type]
