"""Least squares with the same bits on all ranks and devices: all sums are added in one order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LANES = 8192
"""So many sums are kept side by side, and then added in halves."""
RIDGE = 1e-6
"""Added to the squares, as a share of their mean, so that equal inputs have weights too."""


def products(vectors: Sequence[Tensor]) -> Tensor:
    """The sums of products of each vector with each, (k, k) in fp64; of fp32 each product is exact."""
    first, count = vectors[0], len(vectors)
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]
    size = min(LANES, len(first))
    lanes = [torch.zeros(size, dtype=torch.float64, device=first.device) for _ in pairs]
    for start in range(0, len(first), LANES):
        parts = [each[start : start + LANES].double() for each in vectors]
        for lane, (i, j) in zip(lanes, pairs, strict=True):
            lane[: len(parts[0])].add_(parts[i] * parts[j])  # not fused, as devices would round otherwise
    sums = {pair: _halved(lane) for pair, lane in zip(pairs, lanes, strict=True)}
    each = range(count)
    return torch.stack([torch.stack([sums[max(i, j), min(i, j)] for j in each]) for i in each])


def _halved(lanes: Tensor) -> Tensor:
    while len(lanes) > 1:
        short = len(lanes) // 2
        half = len(lanes) - short
        lanes = torch.cat((lanes[:short] + lanes[half:], lanes[short:half]))
    return lanes.sum()


def weights(sums: Tensor) -> Tensor:
    """Of each of m systems the weights (m, k) that foretell the first vector from the k others.

    Args:
        sums: of `products`, (m, k + 1, k + 1).
    """
    squares, truth = sums[:, 1:, 1:], sums[:, 1:, :1]
    count = squares.shape[1]
    unit = torch.eye(count, dtype=sums.dtype, device=sums.device)
    mean = (squares * unit).sum((1, 2), keepdim=True) * (RIDGE / count)
    rows = torch.cat((squares + mean * unit, truth), 2)
    for i in range(count):  # by elimination, and not by a library, whose order is its own
        pivot = rows[:, i, i : i + 1]
        rows[:, i] = torch.where(pivot > 0, rows[:, i] / pivot, 0.0)
        for j in range(count):
            if j != i:
                rows[:, j] -= rows[:, j, i : i + 1] * rows[:, i]
    return rows[:, :, count].nan_to_num(0.0, 0.0, 0.0)
