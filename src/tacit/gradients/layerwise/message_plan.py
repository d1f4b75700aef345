"""Which gradients travel together, and in which order: by when they are ready, and what links cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

__all__ = ["Gradient", "Link", "LinkUse", "MessagePlan", "by_priority", "by_size", "fitted", "merged"]

_SMALL_SHARE = 20
"""A message takes so many times what it costs before its first byte, where it is to be short."""
_SHORTEST, _LONGEST = 256_000, 16_000_000
"""Bytes of a message, where it is to be short; BytePS cuts at 4,096,000."""
_ALIGNED = 1024
"""Entries of a slice are a multiple of so many, so that the blocks of a codec are whole."""


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient.

    Attributes:
        nbytes: that travel for it.
        ready: seconds from the first gradient of a backward pass until this one is there.
        needed: its turn in the next forward pass.
        bucket: which of DDP's buckets it lies in; the gradients of a message lie in one.
        entries: how many it has, where it may be cut into slices; 0: it may not.
    """

    name: str
    nbytes: float
    ready: float
    needed: int = 0
    bucket: int = 0
    entries: int = 0

    def slices(self, most: float) -> list[Gradient]:
        """Slices of about equal size, and of at most `most` bytes; itself, where it may not be cut."""
        count = min(math.ceil(self.nbytes / most), math.ceil(self.entries / _ALIGNED))
        if count < 2:
            return [self]
        size = _ALIGNED * math.ceil(self.entries / count / _ALIGNED)
        cuts = [*range(0, self.entries, size), self.entries]
        return [
            replace(self, name=f"{self.name}[{a}:{b}]", nbytes=self.nbytes * (b - a) / self.entries)
            for a, b in pairwise(cuts)
        ]


@dataclass(frozen=True)
class Link:
    """What a message costs: `latency` seconds, and one for each `rate` bytes of a gradient.

    The latency counts what a message takes of a processor, where that is taken from computing.
    """

    latency: float
    rate: float

    def seconds(self, nbytes: float) -> float:
        """How long a message takes."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class LinkUse:
    """What was sent while ranks computed: `seconds` with something under way, bytes, and messages."""

    seconds: float
    nbytes: float
    messages: int


def fitted(few: LinkUse, many: LinkUse, idle: Link) -> Link:
    """What a message costs while ranks compute, from rounds of few messages and of many.

    Where ranks share cores with what carries their messages, that is more than on links that are `idle`; it
    is never taken for less.
    """
    if not few.nbytes or not many.nbytes:
        return idle
    more = many.messages / many.nbytes - few.messages / few.nbytes
    slower = many.seconds / many.nbytes - few.seconds / few.nbytes
    latency = max(idle.latency, slower / more if more > 0 else 0.0)
    per_byte = min((each.seconds - latency * each.messages) / each.nbytes for each in (few, many))
    return Link(latency, 1 / max(per_byte, 1 / idle.rate))


@dataclass(frozen=True)
class MessagePlan:
    """The messages in the order in which they leave, each with its parameters as backward has them.

    What is in a message is a parameter's name, or NAME[START:STOP] for a slice: see `session.buckets`.
    """

    messages: tuple[tuple[str, ...], ...]


def merged(gradients: Sequence[Gradient], link: Link) -> MessagePlan:
    """Join neighbours so that the last message is through as early as can be.

    `gradients`: in the order in which backward has them. A message leaves when all of it is ready and the
    link is free, and the gradients of one lie in one of DDP's buckets. MG-WFBP (Shi, Chu & Li, INFOCOM 2019)
    goes through the layers once, and joins one with the next if that wait is shorter than the latency saved;
    a chain of such waits can add up, so here all ways to cut are compared: that the first k gradients are
    through early never makes the others later. Of ways that end at the same time, that of fewest messages.
    """
    through: list[tuple[float, int]] = [(0.0, 0)]  # of the first k gradients: when, in how many messages
    begins = [0]
    for stop, last in enumerate(gradients, 1):
        nbytes = 0.0
        found: list[tuple[float, int, int]] = []
        for start in range(stop - 1, -1, -1):
            if gradients[start].bucket != last.bucket:
                break
            nbytes += gradients[start].nbytes
            free, count = through[start]
            found.append((max(free, last.ready) + link.seconds(nbytes), count + 1, start))
        end, count, start = min(found)
        through.append((end, count))
        begins.append(start)
    messages: list[tuple[str, ...]] = []
    stop = len(gradients)
    while stop:
        messages.append(_names(gradients[begins[stop] : stop]))
        stop = begins[stop]
    return MessagePlan(tuple(messages[::-1]))


def by_priority(
    gradients: Sequence[Gradient],
    link: Link,
    most: float | None = None,
    credit: float = 0.0,
    split: bool = False,
) -> MessagePlan:
    """Have the message leave first, of those that are ready, which the next forward pass needs first.

    `gradients`: in the order in which backward has them. Neighbours are joined up to `most` bytes, and what
    is larger is cut; where it is None, that is what makes the latency of a message small beside it. A link
    takes one message at a time, or as many as `credit` bytes allow, which then share it. With `split` they
    leave as backward has them, as what is needed first then shows in the order of the second halves.
    """
    if most is None:
        most = min(max(_SMALL_SHARE * link.latency * link.rate, _SHORTEST), _LONGEST)
    joined = _up_to(most, [part for each in gradients for part in each.slices(most)])
    if split:
        return MessagePlan(tuple(_names(each) for each in joined))
    whole = [_joined(each) for each in joined]
    return MessagePlan(tuple(_names(joined[i]) for i in _order(whole, link, credit)))


def by_size(gradients: Sequence[Gradient], most: float) -> MessagePlan:
    """Neighbours are joined up to `most` bytes."""
    return MessagePlan(tuple(_names(each) for each in _up_to(most, gradients)))


def _up_to(most: float, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    joined: list[list[Gradient]] = []
    room = 0.0
    for each in gradients:
        if not joined or room < each.nbytes or each.bucket != joined[-1][-1].bucket:
            joined.append([])
            room = most
        joined[-1].append(each)
        room -= each.nbytes
    return joined


def _joined(gradients: Sequence[Gradient]) -> Gradient:
    return replace(
        gradients[-1],
        nbytes=sum(each.nbytes for each in gradients),
        ready=max(each.ready for each in gradients),
        needed=min(each.needed for each in gradients),
    )


def _order(messages: Sequence[Gradient], link: Link, credit: float) -> list[int]:
    """By a clock: whenever the link has room, the most urgent of the messages that are ready leaves."""
    waiting = sorted(range(len(messages)), key=lambda i: (messages[i].ready, i))
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    now = 0.0
    while ready or waiting:
        if not ready:
            now = max(now, messages[waiting[0]].ready)
        while waiting and messages[waiting[0]].ready <= now:
            i = waiting.pop(0)
            heappush(ready, (messages[i].needed, i))
        _, chosen = heappop(ready)
        order.append(chosen)
        ahead = max(0.0, credit - messages[chosen].nbytes)  # what more may leave before it is through
        now += max(0.0, link.seconds(messages[chosen].nbytes) - ahead / link.rate)
    return order


def _names(gradients: Sequence[Gradient]) -> tuple[str, ...]:
    return tuple(each.name for each in gradients)
