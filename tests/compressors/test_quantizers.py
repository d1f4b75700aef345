"""What only compressors by levels, signs and powers do."""

from collections.abc import Callable

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.compressors import FP8, FP16, QSGD, Blockwise, Int8, MajoritySign, Natural, OneBit, Sign, TernGrad
from tacit.contracts import Compressor
from tacit.errors import ConfigError

DRAWN = [QSGD(), QSGD(bits=2, bucket=64), QSGD(bits=6, scale="norm"), TernGrad(clip=None), Natural()]
NUMEL = 1000


@pytest.mark.parametrize("compressor", DRAWN, ids=repr)
def test_what_is_drawn_is_right_in_the_mean(compressor: Compressor) -> None:
    """The square error of a mean of 200 draws is a 200th of that of one."""
    x = tensors(1, NUMEL)[0]
    group = Peers(compressor, 1, NUMEL)
    draws = torch.stack([group.exchange([x])[0].mean.double() for _ in range(200)])
    one, mean = ((each - x.double()).square().mean() for each in (draws, draws.mean(0)))
    assert float(one / mean) == pytest.approx(200, rel=0.25)


def test_natural_compression_adds_an_eighth_of_the_square_at_most() -> None:
    x = tensors(1, NUMEL)[0]
    group = Peers(Natural(), 1, NUMEL)
    squares = sum(group.exchange([x])[0].mean.double().square().sum() for _ in range(100)) / 100
    assert 1.0 < float(squares / x.double().square().sum()) < 9 / 8 + 0.01


@pytest.mark.parametrize("compressor", DRAWN, ids=repr)
def test_draws_differ_by_rank_and_round_and_can_be_repeated(compressor: Compressor) -> None:
    x = tensors(1, NUMEL)[0]

    def rounds() -> list[Tensor]:
        group = Peers(compressor, 2, NUMEL)
        return [o.sent.dense(x).clone() for _ in range(2) for o in group.exchange([x.clone(), x.clone()])]

    first, again = rounds(), rounds()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for i in range(4):
        for j in range(i):
            assert not torch.equal(first[i], first[j])


def test_terngrad_sends_three_values_and_clips_what_lies_far_out() -> None:
    x = torch.ones(512)
    x[7] = 1000.0
    (outcome,) = Peers(TernGrad(), 1, 512).exchange([x])
    scale = 2.5 * float(x.square().mean().sqrt())
    assert float(outcome.mean[7]) == pytest.approx(scale)
    assert {round(float(v), 2) for v in outcome.mean.unique()} == {0.0, round(scale, 2)}


def test_equal_entries_arrive_as_they_are() -> None:
    for compressor in (QSGD(), TernGrad(), Int8(), Sign(block=512), OneBit()):
        (outcome,) = Peers(compressor, 1, 600).exchange([torch.full((600,), -0.3)])
        torch.testing.assert_close(outcome.mean, torch.full((600,), -0.3), msg=repr(compressor))


def test_blocks_have_magnitudes_of_their_own() -> None:
    x = torch.cat((torch.full((512,), 2.0), torch.full((88,), -5.0)))
    (outcome,) = Peers(Sign(block=512), 1, 600).exchange([x])
    assert torch.equal(outcome.mean, x)


def test_the_majority_decides_and_a_tie_is_zero() -> None:
    votes = [torch.tensor(each) for each in ([9.0, 1, -1, 0], [-0.1, 1, -1, 1], [-0.1, -5, -1, -1])]
    assert Peers(MajoritySign(), 3, 4).exchange(votes)[0].mean.tolist() == [-1, 1, -1, 1]
    assert Peers(MajoritySign(), 2, 4).exchange(votes[:2])[0].mean.tolist() == [0, 1, -1, 1]


def test_signum_votes_on_the_signs_of_momenta() -> None:
    """m <- beta m + (1 - beta) g; V = sign(sum_r sign(m_r))."""
    group, m = Peers(parse("signsgd:momentum=0.9").compressor, 3, 200), torch.zeros(3, 200).double()
    differs = 0
    for seed in range(8):
        xs = tensors(3, 200, seed)
        m = 0.9 * m + 0.1 * torch.stack(xs).double()
        expected = m.sign().sum(0).sign()
        assert torch.equal(group.exchange(xs)[0].mean.double(), expected)
        differs += int((torch.stack(xs).sign().sum(0).sign() != expected).sum())
    assert differs > 200, "or it votes on gradients"


def test_a_lot_near_the_largest_float_stays_finite() -> None:
    x = torch.full((700,), 3.4e38)
    small = Blockwise(2), Blockwise(3), Blockwise(8)
    for compressor in (
        *small,
        QSGD(),
        TernGrad(),
        Int8(),
        Natural(),
        Sign(),
        Sign(block=512),
        OneBit(),
        FP8(),
    ):
        mean = Peers(compressor, 3, 700).exchange([x.clone() for _ in range(3)])[0].mean
        assert bool(mean.isfinite().all()), compressor
        assert float(mean.min()) > 1e38, compressor


def test_half_precision_says_what_does_not_fit() -> None:
    (outcome,) = Peers(FP16(), 1, 3).exchange([torch.tensor([1.0, 65504.0, 70000.0])])
    assert outcome.mean.tolist() == [1.0, 65504.0, float("inf")]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_uses_its_whole_range(format: str) -> None:
    x = torch.tensor([1e-30, -2e-30, 1e-29 / 3])
    (outcome,) = Peers(FP8(format=format), 1, 3).exchange([x])  # type: ignore[arg-type]
    torch.testing.assert_close(outcome.mean, x, rtol=1 / 8, atol=0)


@for_each(
    ("make", "says"),
    [
        (lambda: QSGD(bits=1), "bits=1 is not a whole number, from 2 to 8.*write 4"),
        (lambda: QSGD(bits=9), "bits=9"),
        (lambda: QSGD(bucket=500), "bucket=500 is not a power of two.*write 512"),
        (lambda: QSGD(bucket=32), "bucket=32"),
        (lambda: QSGD(scale="max"), "unknown scale 'max'.*largest, norm"),  # type: ignore[arg-type]
        (lambda: TernGrad(clip=0.5), "clip=0.5 is not a finite number, 1 or more.*write 2.5"),
        (lambda: TernGrad(clip=float("nan")), "clip=nan"),
        (lambda: Sign(block=64), "block=64 is not possible.*write 512"),  # type: ignore[arg-type]
        (lambda: FP8(format="e3m4"), "unknown format 'e3m4'.*e4m3"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
