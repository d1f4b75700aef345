"""What is predicted from what was heard, how far it is followed, and what is remembered for it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor, nn

from tacit import algorithms
from tacit.contracts import AxisRank, Context, Matrix
from tacit.prediction import Predicted, partly_sent
from tacit.prediction.entry_history import ROUNDS
from tacit.prediction.extrapolation import Exponential, Linear, Persistent, Stale
from tacit.prediction.gain import KEPT, gains, judged
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.mp2 import MP2, MP2Network
from tacit.prediction.networks.wnn import WNN
from tacit.prediction.predictor import KINDS, Predictor, Seen, kind_of
from tacit.prediction.sent_subsets import drawn_others
from tacit.topologies import Flat
from tacit.transports.meter import DryRun, run_dry

MATRICES = (Matrix(0, 64, 200), Matrix(12_800, 64, 144, 4), Matrix(22_016, 64, 1, 1))
N = 22_080
SHIPPED: dict[str, Predictor] = {
    "mp2": MP2(),
    "wnn": WNN(),
    "exponential": Exponential(),
    "linear": Linear(),
    "persistent": Persistent(1.0),
}


@dataclass(frozen=True)
class Against(Predictor):
    """The opposite of the last change; of convolutions, the last change."""

    sign: int = -1

    def change(self, seen: Seen, kind: str) -> Tensor:
        return seen.changes[-1] * (1 if kind == "convolution" else self.sign)


@dataclass(frozen=True)
class Guessing(Predictor):
    """The last change of another entry: as large as the truth, and nothing to do with it."""

    def change(self, seen: Seen, kind: str) -> Tensor:
        last = seen.changes[-1]
        return last[torch.randperm(len(last), generator=torch.Generator().manual_seed(len(last)))]


class Default(Peers):
    """Two ranks with the compressor of `mp2` as it is by default, in rounds after every fourth step."""

    def __init__(self, predictor: Predictor, **options: Any) -> None:
        compressor = algorithms.parse("mp2:rescale=false,sync_every=4").levels[0].compressor
        assert isinstance(compressor, Predicted)
        self.mp2 = (
            replace(compressor, predictor=predictor, **options).for_model(MATRICES).with_layout(MATRICES)
        )
        super().__init__(self.mp2, 2, N)

    def _context(self, rank: int, out: Tensor) -> Context:
        return replace(super()._context(rank, out), step=4 * self.round + 3, lr=0.1)

    def unsent(self) -> Tensor:
        """Which entries that take turns do not travel in the coming round."""
        assert isinstance(self.mp2, Predicted)
        selected = self.mp2.entries_of_round(self.round < 2, self._context(0, torch.empty(N)))
        rest = torch.ones(N, dtype=torch.bool).index_fill(0, selected.where, False)
        assert not bool(rest[22_016:].any())
        return rest


def followed(peers: Default, motion: Callable[[int], Tensor], noise: float, rounds: int) -> list[list[float]]:
    """By round and matrix: which part of the true change of what is not sent was predicted."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(rounds):
        unsent, true = peers.unsent(), motion(number)
        xs = [true + noise * torch.randn(N, generator=generator) for _ in range(2)]
        first, second = peers.exchange(xs)
        assert torch.equal(first.mean, second.mean)
        if bool(unsent.any()):
            told, true = (torch.where(unsent, x, 0.0) for x in (first.mean, true))
            of = [slice(m.start, m.start + m.rows * m.columns) for m in MATRICES[:2]]
            found.append([float(told[i] @ true[i] / (true[i] @ true[i])) for i in of])
    return found


def steady(number: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def shrinking(number: int) -> Tensor:
    return steady(0) * 0.8**number


# ---- in the loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("which", SHIPPED)
def test_steady_motion_is_predicted_in_every_round_and_layer(which: str, noise: float) -> None:
    """With the networks that come with tacit, from the first round in which not all is sent."""
    found = followed(Default(SHIPPED[which]), steady, noise, 40)
    assert len(found) == 38
    # Of two noisy changes the noise is half of what is known, or more: then less can be followed.
    least = {0.0: 0.35, 0.5: 0.3, 2.0: 0.12}[noise]
    assert min(min(each) for each in found) > least
    if noise == 0.0 and which not in ("mp2", "wnn"):
        assert min(min(each) for each in found) == pytest.approx(1.0)


@pytest.mark.parametrize("which", SHIPPED)
def test_motion_that_shrinks_is_predicted_in_every_round(which: str) -> None:
    found = followed(Default(SHIPPED[which]), shrinking, 0.0, 30)
    assert min(min(each) for each in found) > 0.3
    if which == "exponential":
        assert min(min(each) for each in found) == pytest.approx(1.0, rel=1e-3)


def test_it_predicts_from_the_rounds_in_which_an_entry_was_heard_of(
    network: MP2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed by hand, entry by entry: what it was, when; and how the layer swung then and swings now."""
    monkeypatch.setattr(partly_sent, "gains", lambda sums: [1.0] * len(sums))
    peers = Default(network, shrink=0.5)
    assert isinstance(peers.mp2, Predicted)
    heard: list[list[tuple[int, float]]] = [[] for _ in range(N)]
    swings: list[list[float]] = []
    for number in range(9):
        xs, unsent = tensors(2, N, seed=number), peers.unsent()
        true = torch.stack(xs).mean(0)
        got = peers.exchange(xs)[0].mean
        torch.testing.assert_close(got[~unsent], true[~unsent], rtol=1e-5, atol=1e-5)
        spans = [slice(m.start, m.start + m.rows * m.columns) for m in MATRICES]
        swings.append([float(true[s][~unsent[s]].square().mean().sqrt()) for s in spans])
        for i, m in enumerate(MATRICES[:2]) if bool(unsent.any()) else ():
            mine = (unsent.nonzero().flatten() - spans[i].start).clamp(-1)
            mine = mine[(mine >= 0) & (mine < m.rows * m.columns)][::50] + spans[i].start
            pairs = [heard[int(entry)][-2:] for entry in mine]
            ages = torch.tensor([[number - r for r, _ in pair] for pair in pairs]).t()
            changes = torch.tensor([[change for _, change in pair] for pair in pairs]).t()
            then = torch.tensor([[swings[r][i] for r, _ in pair] for pair in pairs]).t()
            seen = Seen(changes, ages.float(), swings[number][i] / then)
            expected = 0.5 * network.change(seen, kind_of(m.dims))
            torch.testing.assert_close(got[mine], expected, rtol=1e-3, atol=1e-5)
        for entry in (~unsent).nonzero().flatten().tolist():
            heard[entry].append((number, float(true[entry])))
    for field, tensor in peers.states[0].items():
        assert peers.mp2.is_shared(field)
        assert torch.equal(tensor, peers.states[1][field])


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> MP2:
    torch.manual_seed(0)
    networks = {kind: MP2Network() for kind in KINDS}
    for each in networks.values():
        nn.init.normal_(each.last.weight, std=0.3)
    file = tmp_path_factory.mktemp("mp2") / "weights.pt"
    weights = {kind: {k: p.detach() for k, p in n.named_parameters()} for kind, n in networks.items()}
    weight_files.write(file, "mp2", weights)
    return MP2(str(file))


# ---- how far predictions are followed -----------------------------------------------------------------


def test_a_prediction_that_is_wrong_is_not_followed_and_one_that_is_right_is() -> None:
    peers = Default(Against())
    found = followed(peers, steady, 0.5, 12)
    assert [each[0] for each in found] == [0.0] * 10
    assert min(each[1] for each in found) > 0.5
    # It is followed again when it has become right.
    peers.compressor = replace(peers.mp2, predictor=Against(1))  # type: ignore[type-var]
    assert followed(peers, steady, 0.5, 20)[-1][0] > 0.5


def test_wrong_predictions_cost_no_more_than_none() -> None:
    """Random motion: nothing can be foretold of it. Guesses as large as the truth would double the error."""

    def error(predictor: Predictor) -> float:
        peers, total = Default(predictor), 0.0
        for number in range(40):
            xs = tensors(2, N, seed=number)
            mean = torch.stack(xs).mean(0)
            unsent = peers.unsent()
            total += float((peers.exchange(xs)[0].mean - mean)[unsent].square().sum() / mean.square().sum())
        return total

    stale = error(Stale())
    for predictor in (Guessing(), Against(), Linear(), Persistent(1.0), MP2()):
        assert error(predictor) < 1.01 * stale


def test_predictions_are_judged_by_entries_as_old_as_those_that_are_predicted() -> None:
    peers = Default(Linear())
    assert isinstance(peers.mp2, Predicted)
    judged_by, used_for = Counter[int](), Counter[int]()
    for number in range(60):
        unsent = peers.unsent()
        age = peers.states[0]["age"]
        if bool(unsent.any()):
            drawn = peers.mp2.entries_of_round(False, peers._context(0, torch.empty(N))).drawn
            judged_by.update(age[drawn].tolist())
            used_for.update(age[unsent].tolist())
        peers.exchange(tensors(2, N, seed=number))
    assert judged_by.keys() == used_for.keys() >= {1, 2}
    for each in used_for:
        share = [counts[each] / counts.total() for counts in (judged_by, used_for)]
        assert share[0] == pytest.approx(share[1], abs=0.02)


def test_nothing_more_is_sent_to_judge() -> None:
    peers = [Default(predictor) for predictor in (Stale(), Linear())]
    for each in peers:
        followed(each, steady, 0.5, 6)
    assert peers[0].net.sent == peers[1].net.sent


@pytest.mark.parametrize("subset", ["rotating", "random", "layers", "magnitude"])
def test_every_subset_is_judged_and_predicted(subset: str) -> None:
    peers, stale = Default(Linear(), subset=subset), Default(Stale(), subset=subset)
    generator, off = torch.Generator().manual_seed(0), [0.0, 0.0]
    for number in range(12):
        xs = [steady(0) + 0.5 * torch.randn(N, generator=generator) for _ in range(2)]
        for i, each in enumerate((peers, stale)):
            error = each.exchange(xs)[0].mean - torch.stack(xs).mean(0)
            off[i] += float(error.norm()) if number > 2 else 0.0
    # Of the largest entries, sent by some and not by others, little can be told of those that are not.
    assert off[0] < (1.0 if subset == "magnitude" else 0.6) * off[1]
    assert all(each > 0.1 for each in gains(peers.states[0]["judged"].view(-1, 4))[:2])


def test_who_is_drawn_was_not_taken() -> None:
    for total, taken in ((10, [0, 3, 4, 9]), (7, []), (5, [0, 1, 2, 3])):
        free = total - len(taken)
        seen = Counter[int]()
        for seed in range(200):
            drawn = drawn_others(total, min(free, 3), torch.tensor(taken, dtype=torch.int64), seed).tolist()
            assert drawn == sorted(set(drawn) - set(taken))
            seen.update(drawn)
        assert set(seen) == set(range(total)) - set(taken)


# ---- the gain -----------------------------------------------------------------------------------------


def gain(guess: Tensor, true: Tensor) -> float:
    owner = torch.zeros(len(true), dtype=torch.int64)
    (found,) = gains(judged(torch.zeros(1, 4, dtype=torch.float64), owner, guess, true))
    return found


def test_the_gain_is_that_of_least_squares_less_its_error() -> None:
    true = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    assert gain(true, true) == 1.0
    assert gain(true / 3, true) == 1.0
    assert gain(true * 4, true) == 0.25
    assert gain(-true, true) == 0.0
    assert gain(torch.zeros(2000), true) == 0.0
    assert gain(noise, true) < 0.05
    # Half of the guess is noise: 1/2, less the error of 2000 entries, which is sqrt(1/2) / sqrt(4000).
    assert gain(true + noise, true) == pytest.approx(0.5 - 0.011, abs=0.04)
    assert gain((true + noise)[:20], true[:20]) < gain(true + noise, true)
    assert gain(true[:2], true[:2]) == 0.0, "of two entries nothing can be known"
    for scale in (1e-30, 1e30):
        assert gain(scale * (true + noise), scale * true) == gain(true + noise, true)
    assert gain(torch.full((5,), torch.inf), true[:5]) == 0.0


def test_what_a_parameter_did_long_ago_counts_less_and_less() -> None:
    true = torch.randn(500, generator=torch.Generator().manual_seed(0))
    owner = torch.zeros(500, dtype=torch.int64)
    sums = judged(torch.zeros(2, 4, dtype=torch.float64), owner, true, true)
    for number in range(12):
        # However small motion has become: as under a learning rate that falls.
        sums = judged(sums, owner, -1e-6 * true, 1e-6 * true)
        assert (gains(sums)[0] > 0) == (number < 0)
    assert float(sums[0, 3]) == pytest.approx(500 * (1 - KEPT**13) / (1 - KEPT))
    assert gains(sums)[1] == 0.0
    assert torch.equal(judged(sums, owner[:0], true[:0], true[:0]), sums)


def test_the_order_of_a_sum_does_not_reach_the_gain() -> None:
    """Ranks with another processor or number of threads add up in another order."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        true = torch.randn(300, generator=generator)
        guess = true + 2 * torch.randn(300, generator=generator)
        order = torch.randperm(300, generator=generator)
        assert gain(guess, true) == gain(guess[order], true[order])


# ---- what is remembered -------------------------------------------------------------------------------


@pytest.mark.parametrize(("predictor", "floats"), [(MP2(), 7), (Linear(), 7), (Stale(), 1)])
def test_memory_an_entry(predictor: Predictor, floats: int) -> None:
    """Two changes and two counts in int16, a spare of each for the round under way, and the last answer."""
    compressor = Default(predictor).mp2
    x = torch.empty(N, device="meta")
    state, work = compressor.init(x), DryRun()
    ctx = Context(out=x, work=work, peers=1, step=100, name="bucket")
    run_dry(Flat().conduct(x, compressor, state, ctx), lambda _: AxisRank())
    each = [2 * t.numel() * t.element_size() for t in state.values()]
    each += [torch.Size(shape).numel() * kind.itemsize for shape, kind in work.scratched.values()]
    assert sum(size for size in each if size >= N) / (4 * N) == floats


def test_an_entry_that_is_not_heard_of_for_long_is_not_predicted() -> None:
    """Its age is counted in int16, and begins anew: as if it had not been heard of."""
    peers = Default(Persistent(1.0))
    followed(peers, steady, 0.0, 4)
    unsent = peers.unsent()
    for state in peers.states:
        state["age"][unsent] = torch.iinfo(torch.int16).max  # type: ignore[index]
    (first, _) = peers.exchange([steady(0)] * 2)
    still = unsent & ~peers.unsent()
    assert int(peers.states[0]["age"][unsent].max()) < 0
    (first, _) = peers.exchange([steady(0)] * 2)
    assert not bool(first.mean[unsent & ~still].any())


def test_layers_swing_as_they_did_for_sixteen_rounds() -> None:
    peers = Default(Linear())
    for number in range(ROUNDS + 3):
        peers.exchange([torch.full((N,), 2.0**-number)] * 2)
    swings = peers.states[0]["swings"].view(-1, ROUNDS)
    expected = [2.0 ** -(r if r > 2 else r + ROUNDS) for r in range(ROUNDS)]
    for row in swings.tolist():
        assert row == pytest.approx(expected)


def test_of_what_was_heard_of_once_nothing_is_predicted() -> None:
    peers = Default(Linear(), full_steps=4)
    unsent = torch.zeros(N, dtype=torch.bool)
    for _ in range(2):
        unsent = peers.unsent()
        (first, _) = peers.exchange([steady(0)] * 2)
    assert not bool(first.mean[unsent].any())


def test_two_full_rounds_fill_what_the_network_looks_at() -> None:
    (mp2,) = algorithms.parse("mp2:rescale=false,sync_every=4").levels
    compressor = mp2.compressor
    assert isinstance(compressor, Predicted)
    assert compressor.full_steps // compressor.every == compressor.predictor.depth == 2
    peers = Default(MP2())
    for _ in range(2):
        peers.exchange([steady(0)] * 2)
    assert bool((peers.states[0]["gap"] == 1).all())
