"""Axes, and the types that all contracts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

WORLD = "world"
"""The axis that holds every replica."""
NODE = "node"
"""The near axis: the replicas of one node."""
NET = "net"
"""The far axis: the replicas that hold the same place in their nodes."""
SERVER = "server"
"""The axis of a replica and the parameter servers, which stand outside of the world."""

Payload: TypeAlias = tuple[Tensor, ...]
"""What one message holds; the shapes follow from the shape of the bucket alone."""
State: TypeAlias = Mapping[str, Tensor]
"""Tensors only, so that any state can be saved, moved and compared."""
ScheduleState: TypeAlias = Mapping[str, float]
"""What a schedule remembers: numbers only."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""One stretch (start, stop) of a flat tensor for each peer, in rank order; together they cover it once."""
Factors: TypeAlias = tuple[tuple[int, int, float], ...]
"""Stretches (start, stop) of a flat tensor, rising and disjoint, each with what it is to be multiplied by."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which state adds up small numbers round after round: of at least 32 bits."""
    return torch.promote_types(dtype, torch.float32)


def cut_factors(factors: Factors, start: int, stop: int) -> Factors:
    """Those of a stretch of the tensor, counted from its start."""
    cut = ((max(a, start) - start, min(b, stop) - start, factor) for a, b, factor in factors)
    return tuple((a, b, factor) for a, b, factor in cut if a < b)
