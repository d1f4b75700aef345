"""Whether entries are finite is told by their sum, and by the largest magnitude where that overflows."""

from __future__ import annotations

import math

import torch

from cases import for_each
from tacit.exchange.finite_checks import BLOCK, divide_, finite, largest

SIZES = [1, 1000, BLOCK + 1]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@for_each("dtype", TYPES)
@for_each("by", [1, 3])
def test_what_is_finite_is_divided_as_torch_divides_it(dtype: torch.dtype, by: int) -> None:
    for numel in (0, *SIZES):
        x, probe = torch.randn(numel).to(dtype), torch.zeros(1)
        quotient = x / by
        divide_(x, by, probe)
        assert torch.equal(x, quotient)
        assert probe.isfinite()
        assert finite(x)
        assert largest(x) == (float(quotient.abs().max()) if numel else 0.0)


@for_each("value", [math.nan, math.inf, -math.inf])
@for_each("dtype", TYPES)
def test_what_is_not_finite_shows(value: float, dtype: torch.dtype) -> None:
    for numel in SIZES:
        for at in {0, numel // 2, numel - 1}:
            x, probe = torch.randn(numel).to(dtype), torch.zeros(1)
            x[at] = value
            assert not finite(x)
            assert not math.isfinite(largest(x))
            divide_(x, 3, probe)
            assert not probe.isfinite()


def test_what_is_finite_is_told_though_its_sum_is_not() -> None:
    x, probe = torch.full((10,), 3e38), torch.zeros(1)
    assert not x.sum().isfinite()
    assert finite(x)
    divide_(x, 1.5, probe)
    assert probe.isfinite()
