"""The names of the axes, and types that all contracts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

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
