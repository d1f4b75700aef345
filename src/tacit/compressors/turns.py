"""Which entries of some parameters travel in a round, so that each has its turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.contracts import Matrix


def size(m: Matrix) -> int:
    """How many entries it has."""
    return m.rows * m.columns


def places(matrices: Sequence[Matrix]) -> Tensor:
    """Where all entries of the matrices lie."""
    spans = [torch.arange(m.start, m.start + size(m)) for m in matrices]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def in_turn(matrices: Sequence[Matrix], count: int, round_: int, seed: int) -> Tensor:
    """`count` entries of the matrices, rising: of so many equal stretches one each, the next in every round.

    With which of its entries a stretch begins follows from the seed.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64)
    bounds = _stretches(matrices, count)
    first = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sizes = bounds.diff()
    return _placed(matrices, bounds[:-1] + ((first * sizes).long() + round_) % sizes)


def at_random(matrices: Sequence[Matrix], count: int, seed: int) -> Tensor:
    """`count` entries of the matrices, rising: of so many equal stretches one each, whichever falls out."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    bounds = _stretches(matrices, count)
    draw = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _placed(matrices, bounds[:-1] + (draw * bounds.diff()).long())


def by_layers(matrices: Sequence[Matrix], count: int, round_: int) -> Tensor:
    """`count` entries of the matrices, rising: one layer after the other, from where the last ones ended."""
    total = sum(map(size, matrices))
    if not count:
        return torch.empty(0, dtype=torch.int64)
    return _placed(matrices, ((torch.arange(count) + round_ * count) % total).sort().values)


def _stretches(matrices: Sequence[Matrix], count: int) -> Tensor:
    total = sum(map(size, matrices))
    return torch.arange(count + 1) * total // count


def _placed(matrices: Sequence[Matrix], at: Tensor) -> Tensor:
    """Where the entries lie that are the `at`-th of all matrices, joined."""
    ends = torch.tensor([0, *map(size, matrices)]).cumsum(0)
    starts = torch.tensor([m.start for m in matrices]) - ends[:-1]
    return at + starts[torch.bucketize(at, ends[1:], right=True)]
