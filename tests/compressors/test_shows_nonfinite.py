"""A NaN that shows in a payload is looked for only then; what is said of it is what was said before."""

from __future__ import annotations

import pytest
import torch

from cases import for_each
from tacit.compressors import FP8, QSGD, Blockwise, ErrorFeedback, Int8, OneBit, PowerSGD, Sign, TernGrad
from tacit.contracts import Compressor, Context, FusedCodec, OneShot
from tacit.errors import NonFinite, Overflow
from tacit.exchange.finite_checks import extreme
from tacit.session.health import nonfinite
from tacit.strategy import Strategy
from tacit.testing.ranks import FreshBuffers, RanksInProcess
from tacit.topologies import Flat, TwoPhase

CODECS: list[OneShot] = [
    *(Int8(), Blockwise(2), Blockwise(3), Blockwise(8), Sign(), Sign(512), OneBit(), FP8(), FP8("e5m2")),
    *(QSGD(), QSGD(scale="norm"), QSGD(bits=2, bucket=4096), TernGrad(), TernGrad(clip=None)),
]
SHAPES = {"weight": (40, 40), "bias": (30,), "other": (20, 30)}


@for_each("codec", CODECS)
def test_what_is_not_finite_shows_in_the_payload(codec: OneShot) -> None:
    assert codec.shows_nonfinite
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for numel, at in ((513, 512), (1500, 700)):
            for value in (torch.nan, -torch.inf):
                x, owed = torch.randn(2, numel).to(dtype)
                x[at] = value
                ctx = Context(x, FreshBuffers(), 4, name="x")
                payloads = [codec.encode(x, ctx)]
                if isinstance(codec, FusedCodec):
                    payloads.append(codec.encode(x, ctx, owed, x.clone()))
                for payload in payloads:
                    floats = [part for part in payload if part.is_floating_point()]
                    assert any(map(extreme, floats)), (dtype, numel, at, value)


def _ranks(compressor: Compressor, two_phase: bool = True) -> RanksInProcess:
    topology = TwoPhase() if two_phase else Flat()
    return RanksInProcess(Strategy(compressor=compressor, topology=topology), 3, torch.float32, SHAPES)


@for_each("two_phase", [False, True])
@for_each("codec", [Int8(), Sign(512)])
def test_the_rank_and_the_first_parameter_are_named(codec: OneShot, two_phase: bool) -> None:
    starts = {"weight": 0, "bias": 1600, "other": 1630}
    for broken in (("bias",), ("weight", "bias"), ("other",)):
        group = _ranks(ErrorFeedback(codec), two_phase)
        xs = group.tensors(0)
        for name in broken:
            xs[1][starts[name] + 3] = torch.nan
        with pytest.raises(NonFinite, match=f"the gradient of {broken[0]} on rank 1, in step 0"):
            group.exchange(xs)


def test_the_gradient_is_not_looked_at_where_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*of: object) -> int:
        raise AssertionError("the gradient was looked at")

    monkeypatch.setattr(nonfinite.NonfiniteChecks, "divide", looked)
    group = _ranks(ErrorFeedback(Int8()))
    assert group.exchange(group.tensors(0)).isfinite().all()
    xs = group.tensors(1)
    xs[2][5] = torch.inf
    with pytest.raises(AssertionError):
        group.exchange(xs)


def test_what_becomes_too_large_with_its_residual_is_still_an_overflow() -> None:
    group = _ranks(ErrorFeedback(Blockwise(2)))
    xs = [torch.zeros(group.numel) for _ in range(3)]
    for x in xs:
        x[:2] = torch.tensor([3e38, 1.4e38])
    group.exchange([x.clone() for x in xs])
    xs[0][1] = 3e38
    with pytest.raises(Overflow, match="too large to be sent or kept"):
        group.exchange(xs)


def test_a_mean_that_its_factors_bound_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def finite(x: torch.Tensor) -> bool:
        looked.append(x.numel())
        return bool(x.isfinite().all())

    monkeypatch.setattr("tacit.session.bucket_exchange.finite", finite)
    group = _ranks(ErrorFeedback(PowerSGD(rank=1)), two_phase=False)
    group.exchange(group.tensors(0))
    assert not looked
    xs = group.tensors(0)
    xs[2][7] = torch.nan
    with pytest.raises(NonFinite, match="on rank 2, in step 0"):
        group.exchange(xs)
    assert group.numel in looked
