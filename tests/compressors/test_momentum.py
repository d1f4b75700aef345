"""Momentum correction and phases: what the laws cannot know of them."""

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import (
    BF16,
    FP16,
    Clip,
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    PowerSGD,
    RandomK,
    Scheduled,
    Sign,
    Threshold,
    TopK,
)
from tacit.contracts import Compressor, Matrix, Momentum
from tacit.errors import ConfigError
from tacit.topologies import TwoPhase

N = 300


def corrected(ratio: float, **options: object) -> MomentumCorrection:
    return MomentumCorrection(ErrorFeedback(TopK(ratio=ratio)), **options)  # type: ignore[arg-type]


def sgd_moves(gradients: list[Tensor], **options: object) -> list[Tensor]:
    """What torch's SGD moves the parameters by, at a learning rate of 1."""
    p = torch.zeros_like(gradients[0])
    optimizer = torch.optim.SGD([p], lr=1.0, **options)  # type: ignore[arg-type]
    moves = []
    for gradient in gradients:
        before, p.grad = p.clone(), gradient
        optimizer.step()
        moves.append(before - p)
    return moves


@pytest.mark.parametrize("nesterov", [False, True])
def test_all_sent_without_masking_is_momentum_sgd(nesterov: bool) -> None:
    rounds = [tensors(3, N, seed) for seed in range(6)]
    expected = sgd_moves([torch.stack(xs).mean(0) for xs in rounds], momentum=0.8, nesterov=nesterov)
    for inner in (ErrorFeedback(TopK(ratio=1.0)), Dense()):
        group = Peers(MomentumCorrection(inner, 0.8, nesterov, masking=False), 3, N)
        for xs, move in zip(rounds, expected, strict=True):
            torch.testing.assert_close(group.exchange(xs)[0].mean, move, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inner", [ErrorFeedback(TopK(ratio=1.0)), Dense(), ErrorFeedback(Dense())])
def test_all_sent_with_masking_is_plain_sgd(inner: Compressor) -> None:
    group = Peers(MomentumCorrection(inner), 3, N)
    for seed in range(4):
        xs = tensors(3, N, seed)
        mean = group.exchange(xs)[0].mean
        torch.testing.assert_close(mean, torch.stack(xs).mean(0))
        assert not bool(group.states[0]["velocity"].any())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_a_round_follows_the_papers_lines(nesterov: bool, masking: bool) -> None:
    group = Peers(corrected(0.1, momentum=0.7, nesterov=nesterov, masking=masking), 1, N)
    u, v = torch.zeros(N), torch.zeros(N)
    for seed in range(8):
        (g,) = tensors(1, N, seed)
        if nesterov:
            u = 0.7 * (u + g)
            v = v + u + g
        else:
            u = 0.7 * u + g
            v = v + u
        sent = torch.zeros(N, dtype=torch.bool)
        sent[v.abs().topk(30).indices] = True
        (outcome,) = group.exchange([g])
        torch.testing.assert_close(outcome.mean, v * sent, rtol=1e-4, atol=1e-4)
        v[sent] = 0
        if masking:
            u[sent] = 0
        torch.testing.assert_close(group.states[0]["inner.residual"], v, rtol=1e-4, atol=1e-4)
        kept = group.states[0]["velocity"] * (0.7 if nesterov else 1.0)
        torch.testing.assert_close(kept, u, rtol=1e-4, atol=1e-4)
        u, v = kept.clone(), group.states[0]["inner.residual"].clone()


@pytest.mark.parametrize("compressor", [TopK(ratio=0.1), Threshold(tau=2.0), Sign(), RandomK(ratio=0.1)])
def test_velocity_is_forgotten_where_something_was_sent(compressor: Compressor) -> None:
    group = Peers(MomentumCorrection(ErrorFeedback(compressor)), 2, N)
    for seed in range(3):
        outcomes = group.exchange(tensors(2, N, seed))
        for outcome, state in zip(outcomes, group.states, strict=True):
            heard = outcome.sent.dense(outcome.mean) != 0
            assert not bool(state["velocity"][heard].any())
            assert torch.equal(state["velocity"] != 0, ~heard)


def test_what_is_exempt_has_momentum_and_is_not_clipped() -> None:
    inside = Clip(corrected(0.1, momentum=0.5, nesterov=True), 1.0)
    assert inside.exempted() == MomentumCorrection(Dense(), 0.5, nesterov=True, masking=False)
    assert inside.takes_momentum == Momentum(0.5, nesterov=True)
    assert ErrorFeedback(TopK()).exempted() is None
    assert ErrorFeedback(TopK()).takes_momentum is None


@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, float("nan")])
def test_a_momentum_out_of_range_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match=r"not in \(0, 1\).*such as 0.9"):
        corrected(0.1, momentum=momentum)


# ---- phases -------------------------------------------------------------------------------------------


def test_what_one_phase_owes_the_next_one_sends() -> None:
    compressor = Scheduled(((2, ErrorFeedback(TopK(ratio=0.1))),), ErrorFeedback(TopK(ratio=1.0)))
    assert compressor.changes == (2,)
    first, second = Peers(compressor.phases[0][1], 1, N), Peers(compressor.then, 1, N)
    given = torch.zeros(N)
    for seed in range(2):
        given += tensors(1, N, seed)[0]
        outcome = first.exchange(tensors(1, N, seed))[0]
        given -= outcome.mean
    second.states = first.states
    torch.testing.assert_close(second.exchange([torch.zeros(N)])[0].mean, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("phases", "scales"),
    [
        ((FP16(),), True),
        ((FP16(), Dense(), BF16()), True),
        ((FP16(), ErrorFeedback(TopK())), False),
        ((Sign(), FP16()), False),
        ((FP16(), Sign(), FP16()), False),
    ],
)
def test_a_factor_on_all_gradients_stays_where_no_phase_minds_it(
    phases: tuple[Compressor, ...], scales: bool
) -> None:
    *first, last = phases
    assert Scheduled(tuple((1, each) for each in first), last).scales is scales


def test_dgc_warms_up_in_four_phases() -> None:
    (level,) = parse("dgc:warmup_steps=10").levels
    assert isinstance(level.compressor, Scheduled)
    ratios = [(steps, each.inner.inner.ratio) for steps, each in level.compressor.phases]  # type: ignore[attr-defined]
    assert ratios == [(2, 0.25), (3, 0.0625), (2, 0.015625), (3, 0.00390625)]
    assert level.compressor.then == corrected(0.001)
    (short,) = parse("dgc:ratio=0.1,warmup_steps=4,max_norm=2.0").levels
    assert isinstance(short.compressor, Clip)
    assert short.compressor.changes == (1, 2, 3, 4)
    assert [each.inner.inner.ratio for _, each in short.compressor.inner.phases] == [0.25, 0.1, 0.1, 0.1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Scheduled(((0, Dense()),), Dense()), "write 1 or more"),
        (lambda: Scheduled(((1, corrected(0.1)),), ErrorFeedback(TopK())), "differ in momentum"),
        (
            lambda: Scheduled(((1, Sign()),), ErrorFeedback(Sign())).init(torch.empty(5)),
            "takes over the state",
        ),
        (lambda: parse("dgc:warmup_steps=3"), "cannot be cut into 4 phases"),
        (lambda: parse("dgc:warmup_steps=-1"), "cannot be cut into 4 phases"),
    ],
)
def test_phases_that_cannot_be_are_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


def test_matrices_are_passed_on_to_all_phases() -> None:
    low = [ErrorFeedback(PowerSGD(rank=rank)) for rank in (1, 2)]
    with_layout = Scheduled(((5, low[0]),), low[1]).with_layout((Matrix(0, 10, 30),))
    assert isinstance(with_layout, Scheduled)
    assert [each.inner.matrices for each in (with_layout.phases[0][1], with_layout.then)] == [
        (Matrix(0, 10, 30),)
    ] * 2  # type: ignore[attr-defined]
    assert TwoPhase().fields(with_layout) == ()
