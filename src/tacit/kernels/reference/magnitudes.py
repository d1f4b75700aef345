"""`kernels.magnitudes` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements divided and added up at a time: they stay in the second-level cache between the two."""


def largest(x: Tensor) -> float:
    """`kernels.magnitudes.largest`."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return float(torch.maximum(-low, high))


def divide_(x: Tensor, by: float) -> float:
    """`kernels.magnitudes.divide_`: returns the sum, which torch finds four times as fast as the largest."""
    total = torch.zeros((), dtype=torch.float32)
    for start in range(0, x.numel(), BLOCK):
        total += x[start : start + BLOCK].div_(by).sum()
    return float(total) if total.isfinite() else largest(x)


def round_to_(x: Tensor, out: Tensor) -> None:
    """`kernels.magnitudes.round_to_`."""
    out.copy_(x)


widen_ = round_to_
