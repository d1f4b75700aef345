"""The parts of a model that have separate rounds, and the buckets of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tacit.errors import AttachError
from tacit.replicas.replica import LiveTensors
from tacit.session.buckets import Bucket


def fragments(named: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """The names in `count` parts of about equal size: neighbours together, the last layers first.

    Raises:
        AttachError: there are fewer names than parts.
    """
    if len(named) < count:
        raise AttachError(
            f"a model of {len(named)} parameters cannot be cut into {count} fragments: write fewer, "
            f"such as fragments={max(len(named), 1)}"
        )
    total, done = sum(p.numel() for p in named.values()), 0
    parts: list[list[str]] = [[]]
    for i, (name, p) in enumerate(reversed([*named.items()])):
        must = len(named) - i == count - len(parts)  # each remaining parameter is a part
        if parts[-1] and len(parts) < count and (must or done + p.numel() / 2 > total * len(parts) / count):
            parts.append([])
        parts[-1].append(name)
        done += p.numel()
    return parts


def buckets_of_parts(buckets: Sequence[Bucket], named: Mapping[str, Tensor], count: int) -> list[list[int]]:
    """The numbers of the buckets of each of the `count` parts."""
    whole = named.whole() if isinstance(named, LiveTensors) else named  # so that all ranks cut equally
    homes = {name: part for part, names in enumerate(fragments(whole, count)) for name in names}
    parts: list[list[int]] = [[] for _ in range(count)]
    for i, bucket in enumerate(buckets):
        parts[homes[bucket.slices[0].name]].append(i)
    return parts
