"""Arithmetic that rounds alike on every device, and sums in the order that the compiled versions keep to."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_UNIT, LARGEST = 2.0**-126, 3.4e38
"""The smallest unit whose inverse is finite, and the largest magnitude that scales count with."""


def divide(y: Tensor, by: float) -> Tensor:
    """y / by, rounded correctly: by a number of the host, CUDA would multiply by its inverse."""
    return y / y.new_full((), by)


def lane_sums(y: Tensor, bucket: int) -> Tensor:
    """The sum of each row of up to `bucket` entries: down bucket / 8 lanes, then in halves."""
    y = torch.nn.functional.pad(y, (0, bucket - y.shape[1])).view(-1, 8, bucket // 8)
    total = torch.zeros_like(y[:, 0])
    for j in range(8):
        total += y[:, j]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def inverse_of(unit: Tensor) -> Tensor:
    """1 / unit, or 0 where that would overflow."""
    return torch.where(unit >= SMALLEST_UNIT, 1 / unit, 0.0)


def largest_of(row: Tensor) -> Tensor:
    """The largest magnitude of each row, at most 3.4e38, in fp32; what is not finite counts as 3.4e38."""
    return capped(row.abs().amax(1).float())


def capped(magnitude: Tensor) -> Tensor:
    """At most 3.4e38; so is NaN, so that it shows in a payload."""
    return torch.where(magnitude <= LARGEST, magnitude, LARGEST)
