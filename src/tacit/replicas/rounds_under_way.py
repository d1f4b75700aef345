"""What is kept of rounds: those that are under way, and the fields of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tacit.replicas.local_deltas import ASIDE, GIVEN, MINE
from tacit.session import PendingRound
from tacit.session.buckets import Bucket, StateSlice

COMMON = "anchor"
MERGE = "merge."
MEAN = "mean"
"""The state field of a round that is under way: its mean, once it is there."""
PUT = "unrounded"
"""Where a replica that keeps something of its own was put, before it was rounded to the parameters' type."""
RANKS_OWN = (MINE, PUT, GIVEN, ASIDE)
"""Fields that each rank has its own of."""


@dataclass(frozen=True, eq=False)
class UnappliedRound:
    """A round that has left, and has not been applied.

    Attributes:
        buckets: that travel in it.
        step: that it followed; `apply_at`: after which its answer is applied.
        pending: None where it was complete before a checkpoint.
    """

    buckets: tuple[int, ...]
    step: int
    apply_at: int
    pending: PendingRound | None = None


def fields_of(
    buckets: Sequence[Bucket], tensors: Iterable[tuple[int, Tensor | None]], field: str
) -> dict[tuple[str, str], StateSlice]:
    """A field of each parameter of these buckets, as views of the buckets' flat tensors.

    `tensors`: the number of a bucket and its tensor, where it has one.
    """
    shared = field not in RANKS_OWN
    return {
        (param.name, field): StateSlice(flat[param.start : param.stop], shared, 0, param.stop - param.start)
        for i, flat in tensors
        if flat is not None
        for param in buckets[i].slices
    }
