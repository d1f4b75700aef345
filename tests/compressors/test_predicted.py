"""What is sent by turns, what is predicted, and when predictions are trusted."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from laws import Bench, Peers, tensors
from torch import Tensor, nn

from tacit.compressors import BF16, QSGD, Predicted
from tacit.compressors.budget import Subset
from tacit.contracts import Context, Matrix, Mean
from tacit.errors import ConfigError, RoundError
from tacit.predictors import KINDS, MP2, Exponential, Linear, Predictor, Stale, files
from tacit.predictors.mp2 import Network

N = 1000
MATRICES = (Matrix(0, 20, 30), Matrix(600, 16, 20, 4), Matrix(920, 80, 1, 1))
TENTH = Predicted(
    budget=0.2, predictor=Linear(), full_steps=0, horizon=10**6, whole_below=1, matrices=MATRICES
)


@dataclass(frozen=True)
class Trend(Predictor):
    """With the trend, or against it; of convolutions, always with it."""

    sign: int = 1

    def change(self, past: Tensor, trend: Tensor, kind: str) -> Tensor:
        return torch.full_like(past[0], float(trend)) * (1 if kind == "convolution" else self.sign)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> MP2:
    torch.manual_seed(0)
    networks = {kind: Network() for kind in KINDS}
    for each in networks.values():
        nn.init.normal_(each.last.weight, std=0.1)
    file = tmp_path_factory.mktemp("mp2") / "weights.pt"
    weights = {kind: {k: p.detach() for k, p in n.named_parameters()} for kind, n in networks.items()}
    files.write(file, "mp2", weights)
    return MP2(str(file))


def at(round_: int, seed: int = 0) -> Context:
    return Context(out=torch.empty(N), work=Bench(), peers=2, round=round_, name="lot", seed=seed)


def test_every_entry_has_its_turn_equally_often_and_vectors_always_travel() -> None:
    turns = TENTH.turns
    assert turns == 200 - 80 - 3
    longest = -(-920 // turns)
    seen = Counter(int(i) for r in range(longest * 20) for i in TENTH.positions(at(r)))
    assert all(seen[i] == longest * 20 for i in range(920, 1000))
    assert all(longest * 20 / longest - 1 <= seen[i] <= longest * 20 / (longest - 1) + 1 for i in range(920))
    for r in range(3):
        chosen = TENTH.positions(at(r))
        assert len(chosen) == turns + 80
        assert bool((chosen.diff() > 0).all())
        assert not torch.equal(chosen, TENTH.positions(at(r + 1)))
        assert not torch.equal(chosen, TENTH.positions(at(r, seed=1)))


def test_steady_motion_is_told_exactly() -> None:
    """Four full rounds fill the history; from then on what is not sent moves as if it were."""
    peers = Peers(replace(TENTH, budget=1.0), 3, N)
    xs = tensors(3, N)
    for _ in range(4):
        peers.exchange(xs)
    peers.compressor = TENTH
    for _ in range(5):
        (first, *_) = peers.exchange(xs)
        torch.testing.assert_close(first.mean, torch.stack(xs).mean(0), rtol=1e-5, atol=1e-6)


def test_ranks_stay_equal_and_predict_what_the_network_says(network: MP2) -> None:
    compressor = replace(TENTH, predictor=network, shrink=0.5, patience=100)
    peers, answers = Peers(compressor, 3, N), [torch.zeros(N) for _ in range(4)]
    for r in range(12):
        xs = tensors(3, N, seed=r)
        chosen = compressor.positions(at(r))
        outcomes = peers.exchange(xs)
        expected = torch.zeros(N)
        for m in MATRICES[:2] if r >= 4 else ():
            span = slice(m.start, m.start + m.rows * m.columns)
            mine = chosen[(chosen >= span.start) & (chosen < span.stop)]
            trend = torch.stack(xs).mean(0)[mine].mean()
            kind = "linear" if m.dims == 2 else "convolution"
            past = torch.stack(answers[-4:])[:, span]
            expected[span] = 0.5 * network.change(past, trend, kind)
        expected[chosen] = torch.stack(xs).mean(0)[chosen]
        torch.testing.assert_close(outcomes[0].mean, expected, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(outcomes[0].mean, other.mean) for other in outcomes[1:])
        for field, tensor in outcomes[0].state.items():
            assert compressor.is_shared(field)
            assert all(torch.equal(tensor, other.state[field]) for other in outcomes[1:])
        answers.append(outcomes[0].mean.clone())


def test_what_is_worse_than_no_change_is_not_predicted_until_it_is_better_again() -> None:
    compressor = replace(TENTH, predictor=Trend(-1), patience=3)
    peers, x = Peers(compressor, 2, N), torch.ones(N)
    others: list[tuple[float, float]] = []
    for _ in range(10):
        mean = peers.exchange([x.clone(), x.clone()])[0].mean
        others.append((float(mean[:600].min()), float(mean[600:920].min())))
    assert others[:4] == [(0.0, 0.0)] * 4  # no history
    assert others[4:7] == [(-1.0, 1.0)] * 3
    assert others[7:] == [(0.0, 1.0)] * 3
    assert peers.states[0]["faults"].tolist() == [3.0, 0.0, 0.0]
    peers.compressor = replace(compressor, predictor=Trend())
    peers.exchange([x.clone(), x.clone()])
    assert peers.states[0]["faults"].tolist()[0] == 0.0
    assert float(peers.exchange([x.clone(), x.clone()])[0].mean[:600].min()) > 0.0


@pytest.mark.parametrize("budget", [0.2, 0.35, 0.9])
def test_the_budget_counts_everything(budget: float) -> None:
    compressor = replace(TENTH, budget=budget, full_steps=5, horizon=100)
    sent = 0
    for step in range(99):
        x = torch.ones(N)
        ctx = replace(at(step), step=step)
        wish = next(compressor.exchange(x, compressor.init(x), ctx))
        assert isinstance(wish, Mean)
        sent += sum(t.numel() for t in wish.payload)
    sent += N  # the end
    assert budget - 0.002 <= sent / (100 * N) <= budget


def test_a_lot_that_is_mostly_small_still_takes_turns() -> None:
    """80 of 1000 travel whole, more than a budget of 5 %: of the others 5 % do, but for the marks."""
    tight = replace(TENTH, budget=0.05)
    assert tight.turns == int(0.05 * 920) - 3
    assert len(tight.positions(at(0))) == 80 + tight.turns


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


def test_a_model_that_leaves_nothing_to_take_turns_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="80 of 1,000 entries\nalways travel".replace("\n", " ")):
        replace(TENTH, budget=0.07).fitted(MATRICES)
    assert replace(TENTH, budget=0.1).fitted(MATRICES).share == pytest.approx(0.02 / 0.92, rel=1e-4)  # type: ignore[attr-defined]


def test_kinds_that_a_predictor_does_not_know_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class OfLinears(Linear):
        def kinds(self) -> tuple[str, ...]:
            return ("linear",)

    for _ in range(3):
        replace(TENTH, predictor=OfLinears()).fitted(MATRICES)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "layers of kind 'convolution'" in caplog.records[0].message


def test_a_learning_rate_that_falls_far_has_everything_sent_and_not_too_often() -> None:
    compressor = replace(TENTH, drops=2, every=1, horizon=1000, full_steps=1)
    x, state, whole = torch.ones(N), compressor.init(torch.ones(N)), []
    for step, lr in enumerate([1.0, 1.0, 0.6, 0.5, 0.5, 0.4, 0.2, 0.2, 0.05, 0.05, 0.05]):
        talk = compressor.exchange(x, state, replace(at(step), step=step, lr=lr))
        wish = next(talk)
        assert isinstance(wish, Mean)
        whole.append(wish.payload[0].numel() == N)
        try:
            talk.send(wish.payload)
        except StopIteration as end:
            state = end.value.state
    # In the round after 0.5 was heard, and after 0.2; the third time the budget has nothing left.
    assert [i for i, each in enumerate(whole) if each] == [0, 4, 7]


@pytest.mark.parametrize("subset", ["random", "layers"])
def test_other_subsets_move_too_and_reach_all(subset: Subset) -> None:
    compressor = replace(TENTH, subset=subset)
    seen = Counter(int(i) for r in range(80) for i in compressor.positions(at(r)))
    assert set(range(920, N)) <= set(seen)
    assert len(seen) == N
    chosen = compressor.positions(at(3))
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
    peers = Peers(TENTH, 3, N)
    for seed in range(2):
        peers.exchange(tensors(3, N, seed))
    apart = dict(peers.states[1])
    apart["past1"] = apart["past1"] + torch.eye(1, N)[0] * 1e-3
    peers.states[1] = apart
    with pytest.raises(RoundError, match="predict differently in the lot of lot"):
        peers.exchange(tensors(3, N, 2))


def test_of_a_short_history_nothing_is_predicted() -> None:
    peers = Peers(replace(TENTH, predictor=Exponential()), 2, N)
    for r in range(4):
        (first, _) = peers.exchange(tensors(2, N, r))
        assert int(first.mean.ne(0).sum()) == TENTH.turns + 80
