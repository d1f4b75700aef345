"""Which entries are sent in a round, so that each is sent in time; indices are among all such entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.contracts import Matrix


def size(m: Matrix) -> int:
    """The number of entries of a matrix."""
    return m.rows * m.columns


def places(matrices: Sequence[Matrix]) -> Tensor:
    """The positions of all entries of the matrices."""
    spans = [torch.arange(m.start, m.start + size(m)) for m in matrices]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def in_turn(total: int, count: int, round_: int, seed: int) -> Tensor:
    """`count` of `total` entries, rising: one from each of `count` equal spans, the next in every round.

    The entry with which a span begins follows from the seed.
    """
    bounds = _spans(total, count)
    sizes = bounds.diff()
    return bounds[:-1] + ((_draws(count, seed) * sizes).long() + round_) % sizes


def at_random(total: int, count: int, seed: int) -> Tensor:
    """`count` of `total` entries, rising: one from each of `count` equal spans, at random."""
    bounds = _spans(total, count)
    return bounds[:-1] + (_draws(count, seed) * bounds.diff()).long()


def by_layers(total: int, count: int, round_: int) -> Tensor:
    """`count` of `total` entries, rising: consecutive ones, after those of the last round."""
    return ((torch.arange(count) + round_ * count) % max(total, 1)).sort().values


def drawn_others(total: int, count: int, taken: Tensor, seed: int) -> Tensor:
    """`count` of those of `total` entries that are not `taken` (rising), drawn at random; rising."""
    at = at_random(total - len(taken), count, seed)
    # The number of entries not taken before each that is.
    before = taken - torch.arange(len(taken))
    return at + torch.searchsorted(before, at, right=True)


def _spans(total: int, count: int) -> Tensor:
    return torch.arange(count + 1) * total // max(count, 1)


def _draws(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placed(matrices: Sequence[Matrix], at: Tensor) -> Tensor:
    """Where the entries lie that are the `at`-th of all matrices, joined."""
    if not len(at):
        return torch.empty(0, dtype=torch.int64)
    ends = torch.tensor([0, *map(size, matrices)]).cumsum(0)
    starts = torch.tensor([m.start for m in matrices]) - ends[:-1]
    return at + starts[torch.bucketize(at, ends[1:], right=True)]
