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
    begins = [places[param.name] + param.offset for param in here]
    if len(here) == len(bucket.slices):
        start = begins[0]
        if all(at == start + param.start for at, param in zip(begins, here, strict=True)):
            whole = SliceCopy(i, start, 0, bucket.numel, len(bucket.slices))
            return [whole if copied else Whole(i, start, start + bucket.numel)]
    return [
        SliceCopy(i, at, param.start, param.stop - param.start)
        for at, param in zip(begins, here, strict=True)
    ]
