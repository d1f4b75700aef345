"""Which buckets are of which part of a model, where each part has rounds of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tacit.hooks.replica import LiveTensors
from tacit.session.buckets import Bucket
from tacit.session.fragments import fragments


def buckets_of_parts(buckets: Sequence[Bucket], named: Mapping[str, Tensor], count: int) -> list[list[int]]:
    """The numbers of the buckets of each of the `count` parts."""
    whole = named.whole() if isinstance(named, LiveTensors) else named  # so that ranks cut alike
    homes = {name: part for part, names in enumerate(fragments(whole, count)) for name in names}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, bucket in enumerate(buckets):
        parts[homes[bucket.slices[0].name]].append(i)
    return parts
