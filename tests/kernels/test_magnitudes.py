"""Magnitudes, divisions and bf16 by numba are those of torch, to the last bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cases import for_each
from tacit.exchange.finite_checks import finite
from tacit.kernels.magnitudes import divide_, largest, round_to_, widen_
from tacit.kernels.reference import magnitudes as reference

SIZES = [0, 1, 63, 64, 65, 1000, 4097]


def _any_finite(numel: int) -> Tensor:
    """Of any exponent, denormal ones too."""
    patterns = torch.randint(-(2**31), 2**31, (numel,)).to(torch.int32)
    return patterns.view(torch.float32).nan_to_num(nan=1.0)


@for_each("by", [1, 2, 3, 5, 6, 7, 8, 100])
def test_all_numbers_of_bf16_are_divided_as_torch_divides_them(by: int) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    mine = every[every.isfinite()]
    theirs = mine.clone().div_(by)
    most = divide_(mine, by)
    assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    assert math.isfinite(most)
    assert largest(theirs) == float(theirs.abs().max())


@for_each("numel", SIZES)
def test_fp32_is_divided_and_rounded_as_torch_does_it(numel: int) -> None:
    mine = _any_finite(numel)
    theirs, again = mine.clone().div_(3), mine.clone()
    assert divide_(mine, 3) == reference.largest(theirs) == largest(theirs)
    assert math.isfinite(reference.divide_(again, 3))
    assert torch.equal(mine, theirs)
    assert torch.equal(again, theirs)
    short, wide = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)
    round_to_(mine, short)
    widen_(short, wide)
    assert torch.equal(short, theirs.to(torch.bfloat16))
    assert torch.equal(wide, short.float())


@for_each("numel", SIZES[1:])
@for_each("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(numel: int, value: float) -> None:
    for at in {0, numel // 2, numel - 1}:
        x, short = torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
        x[at] = value
        round_to_(x, short)
        for tensor in (x, short, x.double(), x.half()):
            found = [each(tensor.clone(), 3) for each in (divide_, reference.divide_)]
            assert not any(map(math.isfinite, [largest(tensor), *found]))


def test_what_is_finite_is_told_though_its_sum_is_not() -> None:
    x = torch.full((10,), 3e38)
    assert not x.sum().isfinite()
    assert finite(x)
    assert math.isfinite(reference.divide_(x, 1.5))
