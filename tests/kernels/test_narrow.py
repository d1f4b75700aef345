"""Rounding to bf16 at random: right in the mean, and compiled and by torch the same bits."""

import math

import pytest
import torch

from tacit.kernels import dispatch
from tacit.kernels.narrow import round_at_random
from tacit.kernels.reference import narrow as reference

SPECIAL = [math.inf, -math.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.0, -1.0]


@pytest.mark.parametrize("numel", [0, 1, 7, 512, 1100])
@pytest.mark.parametrize("seed", [0, 7, 2**62 - 1])
def test_the_same_bits(numel: int, seed: int) -> None:
    pytest.importorskip("numba")
    assert dispatch.active_backend() == "numba"
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 5
    x[3 : 3 + len(SPECIAL)] = torch.tensor(SPECIAL)[: max(0, numel - 3)]
    x.view(torch.int32)[20:40:3] = 0x7FFFFFFF  # NaN
    x.view(torch.int32)[21:40:3] = 0x7F800001
    fast, slow = (torch.full((numel,), 3.0, dtype=torch.bfloat16) for _ in range(2))
    round_at_random(x, seed, fast)
    reference.round_at_random(x, seed, slow)
    assert torch.equal(fast.view(torch.int16), slow.view(torch.int16))
    assert torch.equal(fast.isnan(), x.isnan())
    exact = torch.isin(x, torch.tensor([0.0, 1.0, -1.0, math.inf, -math.inf]))
    assert torch.equal(fast[exact].float(), x[exact])


def test_it_is_right_in_the_mean_and_near() -> None:
    x = torch.randn(2048, generator=torch.Generator().manual_seed(5)) * 3
    out, total = torch.empty(2048, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.float64)
    rounds = 400
    for seed in range(rounds):
        round_at_random(x, seed, out)
        error = out.float() - x
        assert bool((error.abs() < x.abs() * 2.0**-7).all())
        total += error.double()
    of_one = (x.abs() * 2.0**-8).double()  # at most: half the distance of two neighbours of bf16
    assert float((total / rounds / of_one).abs().mean()) < 2 / math.sqrt(rounds)
    nearest = x.bfloat16().double() - x.double()
    assert float((nearest / of_one).abs().mean()) > 5 * float((total / rounds / of_one).abs().mean())
