"""Where the parameters of the session's buckets are in what torch's hook is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tacit.session.buckets import Bucket


@dataclass(frozen=True)
class Whole:
    """Bucket `bucket` of the session is a stretch of DDP's bucket: no copy."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class SliceCopy:
    """Where `slices` parameters are: at `start` in DDP's bucket, at `to` in the session's `bucket`."""

    bucket: int
    start: int
    to: int
    numel: int
    slices: int = 1


Piece: TypeAlias = Whole | SliceCopy


def pieces(i: int, bucket: Bucket, places: dict[str, int], copied: bool) -> list[Piece]:
    """How the parameters of bucket `i` are in a bucket of DDP, where they have these `places`.

    `copied`: whether the bucket travels in a buffer of its own, wherever it is.
    """
    here = [param for param in bucket.slices if param.name in places]
    if len(here) == len(bucket.slices):
        start = places[bucket.slices[0].name]
        if all(places[param.name] == start + param.start for param in bucket.slices):
            whole = SliceCopy(i, start, 0, bucket.numel, len(bucket.slices))
            return [whole if copied else Whole(i, start, start + bucket.numel)]
    return [SliceCopy(i, places[param.name], param.start, param.stop - param.start) for param in here]
