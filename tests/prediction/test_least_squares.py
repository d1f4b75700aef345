"""What is predicted by least squares: the weights, and that every order of arithmetic is fixed."""

from __future__ import annotations

import math
import re

import pytest
import torch
from laws import Peers
from torch import Tensor

from cases import for_each
from tacit.compressors import BF16, Blockwise, Dense, MeanFeedback
from tacit.contracts import Context, Matrix
from tacit.errors import ConfigError
from tacit.prediction import LeastSquares, PredictiveCoding
from tacit.prediction.least_squares import LANES, products, weights
from tacit.strategy import Strategy
from tacit.topologies import Auto, Star
from tacit.topologies.star import Asynchronous
from tacit.topologies.two_phase import SECOND, TwoPhase

LAYERS = (Matrix(0, 30, 40), Matrix(1200, 20, 20))
N = 1600


class Rated(Peers):
    """Ranks whose learning rate is set from outside."""

    lr = 0.1

    def _context(self, rank: int, out: Tensor) -> Context:
        context = super()._context(rank, out)
        values = {name: getattr(context, name) for name in Context.__slots__}
        return Context(**{**values, "lr": self.lr})


def guesses(peers: Peers, x: Tensor) -> Tensor:
    """What all ranks predict before they are given `x`."""
    compressor = peers.compressor
    assert isinstance(compressor, PredictiveCoding)
    found = [torch.full_like(x, torch.nan) for _ in peers.states]
    for rank, (guess, state) in enumerate(zip(found, peers.states, strict=True)):
        compressor.predict_(guess, state, peers._context(rank, torch.empty_like(x)))
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def test_a_dot_product_is_added_in_one_order_whatever_the_threads() -> None:
    """In lanes, then in halves; worked out by Python's floats, which round as fp64 does everywhere."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 7, LANES, LANES + 5, 3 * LANES + 1000):
        a, b = (torch.randn(size, generator=generator) for _ in range(2))
        lanes = [0.0] * min(LANES, size)
        for i, (one, other) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            lanes[i % LANES] += one * other
        while len(lanes) > 1:
            short = len(lanes) // 2
            half = len(lanes) - short
            lanes = [lanes[i] + lanes[half + i] for i in range(short)] + lanes[short:half]
        assert float(products([a, b])[0, 1]) == lanes[0], size
        assert math.isclose(lanes[0], float(a.double() @ b.double()), rel_tol=1e-9, abs_tol=1e-9)
        with_threads = torch.get_num_threads()
        torch.set_num_threads(3)
        assert float(products([a, b])[0, 1]) == lanes[0], size
        torch.set_num_threads(with_threads)


@for_each("count", [1, 2, 3])
def test_weights_are_those_of_least_squares(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    past = torch.randn(count, 500, generator=generator).double()
    truth = torch.randn(500, generator=generator).double() + 0.7 * past.sum(0)
    found = weights(torch.stack([products([truth, *past])]))[0]
    expected = torch.linalg.lstsq(past.T, truth.unsqueeze(1)).solution[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_no_past_and_equal_past_changes_have_finite_weights() -> None:
    assert not bool(weights(torch.zeros(2, 4, 4, dtype=torch.float64)).any())
    one = torch.ones(50, dtype=torch.float64)
    twice = weights(torch.stack([products([one, one, one])]))[0]
    assert bool(twice.isfinite().all())
    assert float(twice.sum()) == pytest.approx(1, abs=1e-4)


@for_each("answers", [1, 3])
def test_each_layer_is_followed_as_far_as_it_repeats_itself(answers: int) -> None:
    """The first repeats 0.8 of each change; the second is new every time."""
    peers = Rated(PredictiveCoding(Dense(), LeastSquares(answers), LAYERS), 2, N)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, generator=generator)
    for _ in range(30):
        x = torch.cat((0.8 * x[:1200] + 0.6 * torch.randn(1200, generator=generator), torch.randn(400)))
        peers.exchange([x.clone(), x.clone()])
    guess = guesses(peers, x)
    torch.testing.assert_close(guess[:1200].norm(), 0.8 * x[:1200].norm(), rtol=0.1, atol=0)
    assert float((guess[:1200] - 0.8 * x[:1200]).norm() / x[:1200].norm()) < 0.15
    assert float(guess[1200:].norm() / x[1200:].norm()) < 0.15


def test_predictions_follow_the_learning_rate_down_and_at_most_twofold_up() -> None:
    peers, x = Rated(PredictiveCoding(Dense(), LeastSquares(), LAYERS), 2, N), torch.ones(N)
    for _ in range(5):
        peers.exchange([x.clone(), x.clone()])
    for rate, expected in ((0.1, 1.0), (0.05, 0.5), (0.2, 2.0), (1e3, 2.0), (0.0, 0.0)):
        peers.lr = rate
        torch.testing.assert_close(guesses(peers, x), torch.full((N,), expected), rtol=1e-4, atol=0)


def test_what_was_learnt_holds_at_another_rate_and_a_step_of_none_changes_nothing() -> None:
    peers, x = Rated(PredictiveCoding(Dense(), LeastSquares(), LAYERS), 2, N), torch.ones(N)
    for _ in range(5):
        peers.exchange([x.clone(), x.clone()])
    for peers.lr in (1e-6, 1e-6, 0.0, 1e-6, 1e-6):
        peers.exchange([x * (peers.lr / 0.1)] * 2)
    torch.testing.assert_close(guesses(peers, x), x * 1e-5, rtol=1e-2, atol=0)


def test_changes_that_turn_round_are_not_predicted_by_one_answer_and_are_by_three() -> None:
    for answers, share in ((1, 0.0), (3, 1.0)):
        peers, x = Rated(PredictiveCoding(Dense(), LeastSquares(answers), LAYERS), 2, N), torch.ones(N)
        for _ in range(8):
            x = -x
            peers.exchange([x.clone(), x.clone()])
        torch.testing.assert_close(guesses(peers, x), -share * x, rtol=1e-2, atol=0)


def test_in_two_phases_the_mean_of_errors_is_compressed_and_what_it_leaves_out_is_kept() -> None:
    coding = PredictiveCoding(MeanFeedback(Blockwise()), LeastSquares())
    assert TwoPhase().fields(coding) == (SECOND,)
    assert TwoPhase() in Auto().options([coding]).topologies


@for_each("coding", [PredictiveCoding(BF16(), LeastSquares()), PredictiveCoding(BF16())])
def test_a_server_that_keeps_parameters_takes_no_errors_of_predictions(coding: PredictiveCoding) -> None:
    with pytest.raises(ConfigError, match="sends errors of a prediction"):
        Star(Asynchronous()).check(coding)
    with pytest.raises(ConfigError, match="sends errors of a prediction"):
        Star(optimizer="server").check(coding)
    with pytest.raises(ConfigError, match="is not one-shot"):
        Star(pull=coding)
    Star().check(coding)


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("write ErrorFeedback for MeanFeedback")):
        Strategy(compressor=PredictiveCoding(MeanFeedback(Blockwise()), LeastSquares()))
    with pytest.raises(ConfigError, match="answers=0 is not a whole number, from 1 to 8"):
        LeastSquares(answers=0)
