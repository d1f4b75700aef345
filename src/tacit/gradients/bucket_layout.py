"""Where the parameters of the session's buckets lie in DDP's buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tacit.session.buckets import Bucket


@dataclass(frozen=True)
class Whole:
    """A bucket of the session that is a span of DDP's bucket: it needs no copy."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class SliceCopy:
    """A copy of `slices` parameters, from `start` in DDP's bucket to `to` in the session's `bucket`."""

    bucket: int
    start: int
    to: int
    numel: int
    slices: int = 1


Piece: TypeAlias = Whole | SliceCopy


def pieces(i: int, bucket: Bucket, starts: dict[str, int], copied: bool) -> list[Piece]:
    """The spans or copies that make bucket `i` of a bucket of DDP.

    Args:
        i: the index of the session's bucket.
        bucket: the session's bucket.
        starts: parameter -> its start in DDP's bucket.
        copied: whether the bucket is always copied into a separate buffer.
    """
    here = [param for param in bucket.slices if param.name in starts]
    begins = [starts[param.name] + param.offset for param in here]
    if len(here) == len(bucket.slices):
        start = begins[0]
        if all(at == start + param.start for at, param in zip(begins, here, strict=True)):
            whole = SliceCopy(i, start, 0, bucket.numel, len(bucket.slices))
            return [whole if copied else Whole(i, start, start + bucket.numel)]
    return [
        SliceCopy(i, at, param.start, param.stop - param.start)
        for at, param in zip(begins, here, strict=True)
    ]
