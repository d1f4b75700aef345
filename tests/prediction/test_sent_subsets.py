"""What is sent by turns, within which budget; and what ranks tell each other of what they predict."""

import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from laws import Bench, Peers, tensors
from torch import Tensor

from tacit import algorithms
from tacit.compressors import BF16, QSGD, Clip, Dense, ErrorFeedback, Scheduled
from tacit.contracts import AllReduce, Compressor, Context, Exchange, Matrix, Outcome, Request
from tacit.errors import ConfigError, RoundError
from tacit.exchange.joined_requests import leaves
from tacit.prediction import Predicted
from tacit.prediction.budget import Subset
from tacit.prediction.extrapolation import Linear, Stale
from tacit.topologies import Flat
from tacit.transports.loopback import Loopback

N = 1000
MATRICES = (Matrix(0, 20, 30), Matrix(600, 16, 20, 4), Matrix(920, 80, 1, 1))
TENTH = Predicted(
    budget=0.2, predictor=Linear(), full_steps=0, horizon=10**6, whole_below=1, matrices=MATRICES
)
STALE = replace(TENTH, predictor=Stale())


def at(round_: int, seed: int = 0) -> Context:
    return Context(out=torch.empty(N), work=Bench(), peers=2, round=round_, name="lot", seed=seed)


def positions(compressor: Predicted, round_: int, seed: int = 0) -> Tensor:
    return compressor.entries_of_round(False, at(round_, seed)).where


def payload_of(*requests: Request) -> list[Tensor]:
    """What travels, all of it in means."""
    wishes = [wish for request in requests for wish in leaves(request)]
    assert all(isinstance(wish, AllReduce) for wish in wishes)
    return [tensor for wish in wishes for tensor in wish.payload]  # type: ignore[union-attr]


def test_what_is_sent_stands_for_the_rounds_in_which_it_is_not() -> None:
    """In the mean over rounds an entry moves as far as if it had been sent in all of them."""
    x, rounds = torch.randn(N, generator=torch.Generator().manual_seed(1)), 400
    for compressor in (STALE, TENTH):
        peers = Peers(replace(compressor, rescale=True), 2, N)
        moved = torch.zeros(N)
        for _ in range(rounds):
            mean = peers.exchange([x.clone(), x.clone()])[0].mean
            moved += mean
        assert torch.equal(mean[920:], x[920:]), "vectors are always sent"
        # A span of seven has its turn more often than one of eight.
        torch.testing.assert_close(moved / rounds, x, rtol=0.16, atol=0.02)
        without = Peers(compressor, 2, N).exchange([x.clone(), x.clone()])[0].mean
        assert float(without[:920].norm()) < 0.6 * float(x[:920].norm())


def test_every_entry_has_its_turn_equally_often_and_vectors_always_travel() -> None:
    turns = STALE.turns
    assert turns == 200 - 80 - 3
    longest = -(-920 // turns)
    seen = Counter(int(i) for r in range(longest * 20) for i in positions(STALE, r))
    assert all(seen[i] == longest * 20 for i in range(920, 1000))
    assert all(longest * 20 / longest - 1 <= seen[i] <= longest * 20 / (longest - 1) + 1 for i in range(920))
    for r in range(3):
        for compressor in (STALE, TENTH):
            chosen = positions(compressor, r)
            assert len(chosen) == turns + 80
            assert bool((chosen.diff() > 0).all())
            assert not torch.equal(chosen, positions(compressor, r + 1))
            assert not torch.equal(chosen, positions(compressor, r, seed=1))


@pytest.mark.parametrize("budget", [0.2, 0.35, 0.9])
def test_the_budget_counts_everything(budget: float) -> None:
    compressor = replace(TENTH, budget=budget, full_steps=5, horizon=100)
    sent = 0
    for step in range(99):
        x = torch.ones(N)
        ctx = replace(at(step), step=step)
        sent += sum(t.numel() for t in payload_of(next(compressor.exchange(x, compressor.init(x), ctx))))
    sent += N  # the end
    assert budget - 0.002 <= sent / (100 * N) <= budget


def test_a_lot_that_is_mostly_small_still_takes_turns() -> None:
    """80 of 1000 travel whole, more than a budget of 5 %: of the others 5 % do, but for the marks."""
    tight = replace(TENTH, budget=0.05)
    assert tight.turns == int(0.05 * 920) - 3
    assert len(positions(tight, 0)) == 80 + tight.turns


def test_a_budget_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"budget=0\.05 is no more than what full_steps=5, drops=0 and the end send of horizon=100",
    ):
        replace(TENTH, budget=0.05, full_steps=5, horizon=100)
    for given in (0.0, 1.5):
        with pytest.raises(ConfigError, match="budget="):
            replace(TENTH, budget=given)
    with pytest.raises(ConfigError, match="is no Predictor"):
        replace(TENTH, predictor="mp2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="horizon="):
        replace(TENTH, full_steps=10, horizon=10)
    with pytest.raises(ConfigError, match="unknown subset"):
        replace(TENTH, subset="fixed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"values=QSGD"):
        replace(TENTH, values=QSGD())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"values=BF16\(\) with subset='magnitude'"):
        replace(TENTH, values=BF16(), subset="magnitude")


EPOCHS = {"steps_per_epoch": 78.0, "epochs": 8.0}


def test_a_budget_is_for_as_many_steps_as_are_known() -> None:
    (mp2,) = algorithms.parse("mp2:rescale=false,sync_every=4").levels
    assert planned(mp2.compressor) == 100
    assert (
        planned(mp2.for_training({}).compressor)
        == planned(mp2.for_training({"epochs": 8.0}).compressor)
        == 100
    )
    assert planned(mp2.for_training(EPOCHS).compressor) == 624
    (explicit,) = algorithms.parse("mp2:rescale=false,sync_every=4,horizon=200").levels
    assert planned(explicit.for_training(EPOCHS).compressor) == 200
    # Of 624 steps fewer are spent on rounds that send everything, so that more is left for the others.
    large = (Matrix(0, 64, 200),)
    shares = [level.for_training(EPOCHS).compressor.for_model(large).share for level in (mp2, explicit)]  # type: ignore[attr-defined]
    assert shares[0] > shares[1]


def planned(compressor: Compressor) -> int:
    assert isinstance(compressor, Predicted)
    return compressor.planned


def test_what_is_around_it_passes_on_how_long_the_training_is() -> None:
    for wrapper in (Clip(STALE, 1.0), ErrorFeedback(STALE)):
        short = replace(wrapper, inner=replace(STALE, horizon=None))
        told = short.for_training(EPOCHS)
        assert planned(told.inner) == 624  # type: ignore[attr-defined]
        assert "the budget was for 624 steps" in told.ended(3)
    inner = replace(STALE, horizon=None)
    phased = Scheduled(((10, inner),), inner).for_training(EPOCHS)
    assert isinstance(phased, Scheduled)
    assert [planned(phased.phases[0][1]), planned(phased.then)] == [624, 624]


def test_a_training_that_ends_early_says_that_more_was_sent_than_the_budget() -> None:
    (mp2,) = algorithms.parse("mp2:rescale=false,sync_every=4").levels
    known = mp2.for_training(EPOCHS).compressor
    assert "the budget was for 624 steps, and training ended after 60" in known.ended(60)
    assert [known.ended(steps) for steps in (624, 625, 6240)] == [""] * 3
    assert "was for 100 steps, and training ended after 40" in mp2.compressor.ended(40)
    assert not mp2.compressor.ended(100)
    assert not algorithms.parse("mp2:rescale=false,sync_every=4,budget=1.0").levels[0].compressor.ended(5)
    assert not Dense().ended(3)


@pytest.mark.parametrize("steps", [20, 60, 99])
def test_what_it_says_of_an_early_end_is_what_was_sent(steps: int) -> None:
    compressor = replace(STALE, budget=0.3, full_steps=5, horizon=100)
    x, sent = torch.ones(N), N  # the end
    for step in range(steps):
        ctx = replace(at(step), step=step)
        sent += sum(t.numel() for t in payload_of(next(compressor.exchange(x, compressor.init(x), ctx))))
    (said,) = re.findall(r"about ([0-9.]+)%", compressor.ended(steps)) or ["30.0"]
    assert float(said) / 100 == pytest.approx(sent / (steps * N), abs=0.003)


def test_so_few_steps_that_no_budget_can_be_kept_are_said(caplog: pytest.LogCaptureFixture) -> None:
    (mp2,) = algorithms.parse("mp2:rescale=false,sync_every=4").levels
    told = mp2.for_training({"steps_per_epoch": 10.0, "epochs": 2.0}).compressor
    assert planned(told) == 100
    assert "budget=0.11 cannot be kept in 20 steps" in caplog.text
    assert "training ended after 20" in told.ended(20)


def test_a_model_that_leaves_nothing_to_take_turns_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="80 of 1,000 entries always travel"):
        replace(TENTH, budget=0.07).for_model(MATRICES)
    assert replace(TENTH, budget=0.1).for_model(MATRICES).share == pytest.approx(0.02 / 0.92, rel=1e-4)  # type: ignore[attr-defined]


def test_kinds_that_a_predictor_does_not_know_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class OfLinears(Linear):
        def kinds(self) -> tuple[str, ...]:
            return ("linear",)

    for _ in range(3):
        replace(TENTH, predictor=OfLinears()).for_model(MATRICES)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "layers of kind 'convolution'" in caplog.records[0].message


def test_a_learning_rate_that_falls_far_has_everything_sent_and_not_too_often() -> None:
    compressor = replace(TENTH, drops=2, every=1, horizon=1000, full_steps=1)
    x, state, whole = torch.ones(N), compressor.init(torch.ones(N)), []
    for step, lr in enumerate([1.0, 1.0, 0.6, 0.5, 0.5, 0.4, 0.2, 0.2, 0.05, 0.05, 0.05]):
        talk = compressor.exchange(x, state, replace(at(step), step=step, lr=lr))
        wishes = leaves(next(talk))
        whole.append(payload_of(*wishes)[0].numel() == N)
        try:
            talk.send([wish.payload for wish in wishes])  # type: ignore[union-attr]
        except StopIteration as end:
            state = end.value.state
    # In the round after 0.5 was heard, and after 0.2; the third time the budget has nothing left.
    assert [i for i, each in enumerate(whole) if each] == [0, 4, 7]


@pytest.mark.parametrize("subset", ["random", "layers"])
def test_other_subsets_move_too_and_reach_all(subset: Subset) -> None:
    compressor = replace(TENTH, subset=subset)
    seen = Counter(int(i) for r in range(80) for i in positions(compressor, r))
    assert set(range(920, N)) <= set(seen)
    assert len(seen) == N
    chosen = positions(compressor, 3)
    assert len(chosen) == compressor.turns + 80
    assert bool((chosen.diff() > 0).all())


def test_the_largest_are_sent_where_that_is_asked_for() -> None:
    compressor = replace(TENTH, subset="magnitude", predictor=Stale())
    x = torch.zeros(N)
    x[[3, 500, 700]] = torch.tensor([5.0, -4.0, 3.0])
    (first, second) = Peers(compressor, 2, N).exchange([x, torch.zeros(N)])
    torch.testing.assert_close(first.mean, x / 2)
    assert torch.equal(first.mean, second.mean)


def test_a_lot_of_small_parameters_travels_whole() -> None:
    vectors = replace(TENTH, matrices=(Matrix(0, 1000, 1, 1),))
    xs = tensors(2, N)
    torch.testing.assert_close(Peers(vectors, 2, N).exchange(xs)[0].mean, torch.stack(xs).mean(0))


def test_histories_that_differ_are_an_error_on_every_rank() -> None:
    """In the round after they have led to another prediction, or soon: a checksum has 5 bits."""
    peers = Peers(replace(TENTH, budget=1.0), 3, N)
    for _ in range(3):
        peers.exchange(tensors(3, N))
    peers.compressor = TENTH
    apart = dict(peers.states[1])
    apart["last"] = apart["last"] + torch.eye(1, N)[0] * 1e-3
    peers.states[1] = apart

    def on() -> None:
        for _ in range(4):
            peers.exchange(tensors(3, N))

    with pytest.raises(RoundError, match="predict differently in the bucket of lot"):
        on()


TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "peers"), [*((dtype, 16) for dtype in TYPES), (torch.float32, 64), (torch.float16, 64)]
)
def test_many_ranks_that_agree_are_never_told_to_differ(dtype: torch.dtype, peers: int) -> None:
    """In 40 rounds nearly all of the 32 checksums come up."""
    group = Peers(TENTH, peers, N)
    group.states = [TENTH.init(torch.empty(N, dtype=dtype)) for _ in range(peers)]
    for r in range(40):
        (first, *others) = group.exchange([x.to(dtype) for x in tensors(peers, N, r)])
        assert all(torch.equal(first.mean, other.mean) for other in others)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_sent_and_the_marks_travel_in_one_message_where_their_types_are_equal(
    dtype: torch.dtype,
) -> None:
    sent = []

    def spied(exchange: Exchange) -> Exchange:
        answer = None
        while True:
            try:
                wish = exchange.send(answer)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            sent.append(wish)
            answer = yield wish

    x = torch.ones(N, dtype=dtype)
    ctx = replace(at(0), out=torch.empty_like(x), peers=1)
    Loopback(1).run([spied(Flat().conduct(x, TENTH, TENTH.init(x), ctx))])
    assert len(sent) == (1 if dtype == torch.float32 else 2)
