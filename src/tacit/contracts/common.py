"""The names of the axes, and types that all contracts share."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

WORLD = "world"
"""The axis that holds every replica."""
NODE = "node"
"""The axis of the replicas of one node."""
NET = "net"
"""The axis between nodes: the replicas with the same rank in their nodes."""
SERVER = "server"
"""The axis of a replica and the parameter servers, which are no ranks of the world."""

Payload: TypeAlias = tuple[Tensor, ...]
"""The tensors of one message. Their shapes depend on the shape of the bucket alone."""
State: TypeAlias = Mapping[str, Tensor]
"""Tensors only, so that any state can be saved, moved and compared."""
ScheduleState: TypeAlias = Mapping[str, float]
"""The state of a schedule: numbers only."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""One (start, stop) of a flat tensor for each peer, in rank order; together they cover it once."""
Factors: TypeAlias = tuple[tuple[int, int, float], ...]
"""(start, stop, factor): spans of a flat tensor, rising and disjoint, with what to multiply each by."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of state that accumulates over rounds: `dtype`, or float32 where that is narrower."""
    return torch.promote_types(dtype, torch.float32)


def cut_factors(factors: Factors, start: int, stop: int) -> Factors:
    """The factors of the entries `start` to `stop`, with positions counted from `start`."""
    cut = ((max(a, start) - start, min(b, stop) - start, factor) for a, b, factor in factors)
    return tuple((a, b, factor) for a, b, factor in cut if a < b)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter in a flat tensor, seen as a matrix: its first dimension by all the others.

    Attributes:
        dims: how many dimensions the parameter has.
    """

    start: int
    rows: int
    columns: int
    dims: int = 2


class Momentum(NamedTuple):
    """Momentum as in `torch.optim.SGD`; or with a `freeze_step` as in `torch.optim.Adam`."""

    factor: float
    nesterov: bool = False
    freeze_step: int | None = None
    """Of Adam: the step from which on the compressor applies momentum, and the variance is kept."""
    refresh: int = 0
    """Of Adam: for how many steps the variance moves again from time to time; see `moving`."""

    @property
    def moving(self) -> Spans:
        """The (start, stop) of the steps in which Adam's variance moves, rising.

        First to `freeze_step`; then, for `refresh` steps each, from 1.5, 1.5^2, 1.5^3 ... times that on, if
        it has been kept as long before. So it is renewed ever more seldom (after 0/1 Adam: Lu et al., ICLR
        2023, arXiv 2202.06009, whose intervals double).
        """
        return () if self.freeze_step is None else _moving(self.freeze_step, self.refresh)

    def keeps_variance(self, step: int) -> bool:
        """Whether Adam's variance is kept in this step, and a momentum travels."""
        spans = self.moving
        i = bisect_right(spans, (step, math.inf)) - 1
        return i >= 0 and step >= spans[i][1]


LONGEST_TRAINING = 10**8
"""The last step after which a variance may be renewed."""


@cache
def _moving(freeze_step: int, refresh: int) -> Spans:
    spans = [(0, freeze_step)]
    start = 1.5 * freeze_step
    while refresh and start < LONGEST_TRAINING:
        if start - spans[-1][1] >= refresh:
            spans.append((int(start), int(start) + refresh))
        start *= 1.5
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Read:
    """Answer: the whole numbers of a small tensor on a device, as a list; never asked for on the host.

    The host waits for them: once for all exchanges that are submitted together, which are launched up to
    theirs before.
    """

    numbers: Tensor
