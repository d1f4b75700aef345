"""Rounds under way, and their fields in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tacit.replicas.bucket_deltas import ASIDE, GIVEN, MINE
from tacit.session import PendingRound
from tacit.session.buckets import Bucket, StateSlice

COMMON = "anchor"
MERGE = "merge."
MEAN = "mean"
"""The field of the mean of a round under way."""
PUT = "unrounded"
"""The field of the unrounded parameters of a replica that does not equal the anchor."""
RANKS_OWN = (MINE, PUT, GIVEN, ASIDE)
"""Fields that differ between ranks."""


@dataclass(frozen=True, eq=False)
class UnappliedRound:
    """A round that has started, and whose answer is not yet applied.

    Attributes:
        buckets: the numbers of its buckets.
        step: the step that it followed.
        apply_at: the step after which its answer is applied.
        pending: the round in the session; None: it was complete before a checkpoint.
    """

    buckets: tuple[int, ...]
    step: int
    apply_at: int
    pending: PendingRound | None = None


def fields_of(
    buckets: Sequence[Bucket], tensors: Iterable[tuple[int, Tensor | None]], field: str
) -> dict[tuple[str, str], StateSlice]:
    """A field of each parameter of these buckets, as views of the buckets' flat tensors.

    `tensors`: the number of each bucket and its tensor, if it has one.
    """
    shared = field not in RANKS_OWN
    return {
        (param.name, field): StateSlice(flat[param.start : param.stop], shared, 0, param.stop - param.start)
        for i, flat in tensors
        if flat is not None
        for param in buckets[i].slices
    }
