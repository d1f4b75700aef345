"""`kernels.magnitudes` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements divided and looked at at a time: they stay in the second-level cache between the two."""


def largest(x: Tensor) -> float:
    """`kernels.magnitudes.largest`."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return float(torch.maximum(-low, high))


def divide_(x: Tensor, by: float) -> float:
    """`kernels.magnitudes.divide_`."""
    most = torch.zeros((), dtype=x.dtype)
    for start in range(0, x.numel(), BLOCK):
        block = x[start : start + BLOCK].div_(by)
        low, high = block.aminmax()
        most = torch.maximum(most, torch.maximum(-low, high))
    return float(most)


def round_to_(x: Tensor, out: Tensor) -> None:
    """`kernels.magnitudes.round_to_`."""
    out.copy_(x)


widen_ = round_to_
