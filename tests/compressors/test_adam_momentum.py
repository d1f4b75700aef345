"""Adam's momentum before compression: what the laws cannot know of it."""

import pytest
import torch
from laws import Peers, tensors

from tacit.algorithms import parse
from tacit.compressors import AdamMomentum, Blockwise, Dense, ErrorFeedback, Int8, OneBit, Sign
from tacit.contracts import Momentum
from tacit.errors import ConfigError
from tacit.strategy import Strategy
from tacit.testing.ranks import RanksInProcess
from tacit.topologies import Flat, TwoPhase

N = 700
EIGHT = ErrorFeedback(Int8())


def test_gradients_travel_first_and_then_the_mean_momentum() -> None:
    group, m = Peers(AdamMomentum(Dense(), Dense(), beta=0.8, freeze_step=3), 3, N), torch.zeros(N)
    for step in range(6):
        xs = tensors(3, N, step)
        mean = torch.stack(xs).mean(0)
        m = 0.8 * m + 0.2 * mean
        for outcome, state in zip(group.exchange(xs, step=step), group.states, strict=True):
            torch.testing.assert_close(outcome.mean, mean if step < 3 else m, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(state["momentum"], m, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", [None, TwoPhase()])
def test_a_compressed_momentum_is_the_papers(topology: TwoPhase | None) -> None:
    compressor = AdamMomentum(ErrorFeedback(Sign(block=512)), beta=0.9, freeze_step=1)
    group = Peers(compressor, 2, N) if topology is None else Peers(compressor, 2, N, topology)
    sent, owed = torch.zeros(N), [torch.zeros(N) for _ in range(2)]
    for step in range(5):
        before = group.states[0]["momentum"].clone()
        xs = tensors(2, N, step)
        done = group.exchange(xs, step=step)
        for state in group.states:  # all ranks have one momentum
            assert torch.equal(state["momentum"], group.states[0]["momentum"])
        if step == 0 or topology is not None:
            owed = [0.1 * state["inner.residual"] for state in group.states]  # of m from now on
            continue
        given = [0.9 * before + 0.1 * x + e for x, e in zip(xs, owed, strict=True)]
        owed = [state["inner.residual"].clone() for state in group.states]
        sent = torch.stack([g - e for g, e in zip(given, owed, strict=True)]).mean(0)
        torch.testing.assert_close(done[0].mean, sent, rtol=1e-4, atol=1e-4)
        assert torch.equal(done[0].mean, group.states[0]["momentum"])


@pytest.mark.parametrize("topology", [Flat(), TwoPhase()])
def test_nothing_is_lost_or_counted_twice_where_gradients_take_over_and_back(topology: Flat) -> None:
    """Momenta have moved by and will move by what exact ones do, where eight bits have just travelled."""
    compressor = AdamMomentum(ErrorFeedback(Sign(block=512)), freeze_step=20, refresh=4)
    ranks = RanksInProcess(
        Strategy(compressor=compressor, topology=topology), 2, torch.float32, {"w": (32, 64)}
    )
    generator, keeps = torch.Generator().manual_seed(0), compressor.takes_momentum.keeps_variance
    exact, mine, ahead, off = *(torch.zeros(2048, dtype=torch.float64) for _ in range(3)), []
    for step in range(160):
        xs = [torch.randn(2048, generator=generator) + 1 for _ in range(2)]
        for session in ranks.sessions:
            session.step = step
        done = ranks.exchange([x.clone() for x in xs]).double()
        exact = 0.9 * exact + 0.1 * torch.stack(xs).double().mean(0)
        mine = done.clone() if keeps(step) else 0.9 * mine + 0.1 * done
        ahead += mine - exact
        if not (keeps(step) and keeps(step + 1)):
            off.append(float((ahead + 9 * (mine - exact)).square().mean().sqrt()))
    assert max(off) < 1.0, [round(x, 2) for x in off]


@pytest.mark.parametrize("topology", [Flat(), TwoPhase()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_no_gradient_does_not_move(topology: Flat, dtype: torch.dtype) -> None:
    """Rows of an odd length, anywhere in blocks; and what has its first gradient late gets it."""
    for codec in (Sign(block=512), OneBit(), Blockwise(3)):
        for compressor in (
            ErrorFeedback(codec),
            AdamMomentum(ErrorFeedback(codec), freeze_step=3, refresh=2),
        ):
            strategy = Strategy(compressor=compressor, topology=topology)
            ranks = RanksInProcess(strategy, 2, dtype, {"w": (61, 37)})
            generator, unused = torch.Generator().manual_seed(0), torch.tensor([0, 7, 8, 13, *range(30, 61)])
            late, total = 13, torch.zeros(37)
            for step in range(18):
                xs = [torch.randn(61, 37, generator=generator).to(dtype) for _ in range(2)]
                for x in xs:
                    x[unused] = 0
                    x[late] = 1.0 if step >= 6 else 0.0
                for session in ranks.sessions:
                    session.step = step
                mean = ranks.exchange([x.view(-1) for x in xs]).view(61, 37)
                still = unused[unused != late] if step >= 6 else unused
                assert not mean[still].any(), (compressor, step)
                total += mean[late]
            assert bool((total > 3).all()), (compressor, total)


def test_in_bf16_the_momentum_is_kept_in_fp32() -> None:
    group = Peers(AdamMomentum(Dense(), Dense(), freeze_step=1), 2, N, dtype=torch.bfloat16)
    for step in range(3):
        xs = [x.bfloat16() for x in tensors(2, N, step)]
        (outcome, _) = group.exchange(xs, step=step)
        assert outcome.mean.dtype == torch.bfloat16
        assert group.states[0]["momentum"].dtype == torch.float32


def test_what_is_exempt_has_the_same_momentum_and_travels_alike() -> None:
    codec, eight = AdamMomentum(ErrorFeedback(Blockwise(3)), EIGHT, 0.8, 7, 5), ErrorFeedback(Blockwise(8))
    assert codec.exempted() == AdamMomentum(eight, eight, 0.8, 7, 5)
    assert AdamMomentum(ErrorFeedback(Sign()), EIGHT, 0.8).exempted() == AdamMomentum(Dense(), Dense(), 0.8)
    assert codec.takes_momentum == Momentum(0.8, freeze_step=7, refresh=5)
    assert codec.is_shared("momentum")
    assert not codec.is_shared("inner.residual")


def test_the_variance_moves_ever_more_seldom() -> None:
    momentum = Momentum(0.9, freeze_step=40, refresh=10)
    assert momentum.moving[:5] == ((0, 40), (60, 70), (90, 100), (135, 145), (202, 212))
    kept = [step for step in range(100) if momentum.keeps_variance(step)]
    assert kept == [*range(40, 60), *range(70, 90)]
    assert AdamMomentum(ErrorFeedback(Sign()), freeze_step=40, refresh=10).changes[:3] == (40, 59, 70)
    # One momentum by itself goes as gradients do, as gradients travel behind it.
    assert AdamMomentum(ErrorFeedback(Sign()), freeze_step=2, refresh=1).changes[:2] == (4, 5)
    never = Momentum(0.9, freeze_step=40)
    assert never.moving == ((0, 40),)
    assert never.keeps_variance(40)
    assert never.keeps_variance(10**9)
    assert not never.keeps_variance(39)
    # Where a part would begin before the last one has been over for as long, it is left out.
    assert Momentum(0.9, freeze_step=4, refresh=5).moving[:3] == ((0, 4), (9, 14), (20, 25))
    assert not Momentum(0.9).keeps_variance(5)  # SGD's


def test_the_named_form() -> None:
    (level,) = parse("onebit-adam:freeze_step=40").levels
    assert level.compressor == AdamMomentum(ErrorFeedback(Sign(block=512)), EIGHT, 0.9, 40, 20)
    assert level.topology == TwoPhase()
    (level,) = parse("onebit-adam:freeze_step=40,bits=3,beta=0.95,refresh=0").levels
    assert level.compressor == AdamMomentum(ErrorFeedback(Blockwise(3)), EIGHT, 0.95, 40, 0)


def test_both_must_keep_the_same() -> None:
    compressor = AdamMomentum(Dense())
    with pytest.raises(ConfigError, match="give both the same wrappers"):
        compressor.init(torch.empty(N))


def test_a_training_too_short_to_freeze_anything_is_told() -> None:
    (level,) = parse("onebit-adam:freeze_step=40").levels
    assert "ended after 40 steps, and freeze_step=40" in level.compressor.ended(40)
    assert level.compressor.ended(41) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("onebit-adam:freeze_step=0", "freeze_step=0.*a fifth of the training's steps"),
        ("onebit-adam:bits=0", "bits=0"),
        ("onebit-adam:bits=9", "bits=9"),
        ("onebit-adam:beta=1.0", r"beta=1.0.*not in \(0, 1\).*such as 0.9"),
        ("onebit-adam:beta=0", r"beta=0.*not in \(0, 1\)"),
    ],
)
def test_what_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)
