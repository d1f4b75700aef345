"""What clipping does to what travels; that it obeys the laws of every compressor is in test_laws."""

import math

import pytest
import torch
from laws import Bench, Peers, tensors
from table import NUMEL
from torch import Tensor

from tacit.compressors import Clip, Dense, ErrorFeedback, PowerSGD, Sign, TopK
from tacit.contracts import AxisRank, Compressor, Context, Matrix, Outcome
from tacit.errors import ConfigError, NonFinite
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies import Flat
from tacit.transports.loopback import Loopback, LoopbackTransport
from tacit.transports.meter import DryRun, run_dry


def exchange(compressor: Compressor, *xs: Tensor, in_place: bool = False) -> list[Outcome]:
    return Peers(compressor, len(xs), xs[0].numel()).exchange(list(xs), in_place)


def norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


@pytest.mark.parametrize("peers", [1, 2, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_each_rank_sends_at_most_its_part_of_the_limit(peers: int, in_place: bool) -> None:
    xs = tensors(peers, NUMEL)
    xs[0] *= 1e-6  # short enough
    given = [x.clone() for x in xs]
    outcomes = exchange(Clip(TopK(ratio=1.0), max_norm=3.0), *xs, in_place=in_place)
    limit = 3.0 * math.sqrt(peers)
    for x, outcome in zip(given, outcomes, strict=True):
        sent = outcome.sent.dense(x)
        assert norm(sent) == pytest.approx(min(limit, norm(x)), rel=1e-5)
        torch.testing.assert_close(sent, x * (norm(sent) / norm(x)))
    expected = torch.stack([x * min(1.0, limit / norm(x)) for x in given]).mean(0)
    torch.testing.assert_close(outcomes[0].mean, expected)


def test_the_lots_of_a_model_share_its_limit() -> None:
    x, lengths = tensors(1, NUMEL)[0], []
    for piece in x.split([100, 900]):
        ctx = Context(out=torch.empty_like(piece), work=Bench(), peers=1, share=piece.numel() / NUMEL)
        talk = Flat().conduct(piece, Clip(Dense(), max_norm=2.0), {}, ctx)
        lengths.append(norm(Loopback(1).run([talk])[0].mean))
    assert lengths == pytest.approx([2.0 * math.sqrt(0.1), 2.0 * math.sqrt(0.9)], rel=1e-5)
    assert math.hypot(*lengths) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "inner", [Dense(), ErrorFeedback(TopK(ratio=0.1)), ErrorFeedback(Sign())], ids=["dense", "topk", "sign"]
)
def test_a_limit_that_is_never_reached_changes_no_bit(inner: Compressor, in_place: bool) -> None:
    bare, clipped = Peers(inner, 3, NUMEL), Peers(Clip(inner, max_norm=1e6), 3, NUMEL)
    for seed in range(3):
        a, b = (each.exchange(tensors(3, NUMEL, seed), in_place)[0] for each in (bare, clipped))
        assert torch.equal(a.mean, b.mean)
        assert {f"inner.{k}" for k in a.state} == set(b.state)
        assert all(torch.equal(v, b.state[f"inner.{k}"]) for k, v in a.state.items())
    assert bare.net.sent == clipped.net.sent


def test_only_what_is_left_is_owed() -> None:
    x = tensors(1, NUMEL)[0]
    (outcome,) = exchange(Clip(ErrorFeedback(TopK(ratio=0.1)), max_norm=1.0), x)
    assert norm(outcome.mean + outcome.state["inner.residual"]) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_zero_gradient_stays_zero(in_place: bool) -> None:
    outcomes = exchange(Clip(Dense(), max_norm=1.0), torch.zeros(9), torch.zeros(9), in_place=in_place)
    assert all(torch.equal(outcome.mean, torch.zeros(9)) for outcome in outcomes)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_not_finite_is_left_for_the_health_check(broken: float, in_place: bool) -> None:
    x = torch.full((9,), 100.0)
    x[3] = broken
    before = x.clone()
    (outcome,) = exchange(Clip(Dense(), max_norm=1.0), x, in_place=in_place)
    assert torch.equal(outcome.mean.nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_gradient_whose_squares_overflow_is_clipped_all_the_same() -> None:
    (outcome,) = exchange(Clip(Dense(), max_norm=1.0), torch.full((4,), 1e30))
    torch.testing.assert_close(outcome.mean, torch.full((4,), 0.5))


def test_a_buffer_is_asked_for_only_where_the_tensor_must_be_left_as_it_is() -> None:
    for in_place in (True, False):
        x, dry_run = torch.empty(NUMEL, device="meta"), DryRun()
        ctx = Context(out=x if in_place else torch.empty_like(x), work=dry_run, peers=2)
        run_dry(Flat().conduct(x, Clip(Dense(), max_norm=1.0), {}, ctx), lambda _: AxisRank(0, 2))
        assert list(dry_run.scratched) == ([] if in_place else ["short"])


def test_what_holds_for_the_one_inside_holds_for_both() -> None:
    matrices = (Matrix(0, 10, 40),)
    inner = ErrorFeedback(PowerSGD(rank=2))
    clip = Clip(inner, max_norm=1.0)
    assert clip.with_layout(matrices) == Clip(inner.with_layout(matrices), max_norm=1.0)
    assert clip.with_layout(matrices).widths("inner.inner.q") == (80,)
    assert clip.widths("inner.residual") is None
    assert clip.is_shared("inner.inner.q")
    assert not clip.is_shared("inner.residual")
    assert clip.exempts(torch.Size([5]))
    assert not clip.exempts(torch.Size([100, 100]))
    assert [Clip(each, max_norm=1.0).hides_nonfinite for each in (Dense(), TopK())] == [False, True]


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_is_no_length_is_refused(max_norm: float) -> None:
    with pytest.raises(ConfigError, match=r"is not a finite number above 0.*write 1\.0"):
        Clip(Dense(), max_norm=max_norm)


@pytest.mark.parametrize("inner", [Dense(), ErrorFeedback(TopK(ratio=0.1)), ErrorFeedback(PowerSGD(rank=2))])
def test_a_session_that_clips_keeps_state_by_parameter_and_names_a_nan(inner: Compressor) -> None:
    named = {"a": torch.zeros(30, 40), "b": torch.zeros(10), "c": torch.zeros(40, 50)}
    net, strategy = Loopback(2), Strategy(compressor=Clip(inner, max_norm=1.0))
    sessions = [
        Session(strategy, named, LoopbackTransport(net, rank), [["c", "b", "a"]]) for rank in range(2)
    ]
    xs = tensors(2, 3210)
    for session, outcome in zip(
        sessions, net.run([s.open(0, x) for s, x in zip(sessions, xs, strict=True)]), strict=True
    ):
        session.complete(0, outcome)
    before = {key: kept.tensor.clone() for key, kept in sessions[0].store.named_state().items()}
    assert ("a", "inner.residual") in before or inner == Dense()
    sessions[0].rebucket([["a"], ["b", "c"]])
    after = sessions[0].store.named_state()
    assert all(torch.equal(tensor, after[key].tensor) for key, tensor in before.items())
    sessions[0].rebucket([["c", "b", "a"]])
    xs[1][2005] = torch.nan
    with pytest.raises(NonFinite, match="the gradient of b on rank 1"):
        net.run([s.open(0, x) for s, x in zip(sessions, xs, strict=True)])
