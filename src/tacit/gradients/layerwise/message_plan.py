"""Which gradients travel together, and in which order: planned by when they are ready, and by link costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

_SMALL_SHARE = 20
"""A short message takes this many times the latency of the link."""
_SHORTEST, _LONGEST = 256_000, 16_000_000
"""The least bytes of a short message; BytePS cuts at 4,096,000."""
_ALIGNED = 1024
"""The entries of a slice are a multiple of this, so that the blocks of a codec are whole."""


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient.

    Attributes:
        nbytes: the bytes that are sent for it.
        ready: seconds from the first gradient of a backward pass until this one is computed.
        needed: its position in the next forward pass.
        bucket: the index of DDP's bucket in which it lies; the gradients of a message lie in one.
        entries: its number of entries, if it may be cut into slices; 0: it may not.
    """

    name: str
    nbytes: float
    ready: float
    needed: int = 0
    bucket: int = 0
    entries: int = 0

    def slices(self, most: float) -> list[Gradient]:
        """Slices of about equal size, of at most `most` bytes each; itself, if it may not be cut."""
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
    """The cost of a message: `latency` seconds, and one second for each `rate` bytes of a gradient.

    The latency includes the processor time of a message, if that delays computing.
    """

    latency: float
    rate: float

    def seconds(self, nbytes: float) -> float:
        """The seconds that a message takes."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class LinkUse:
    """Use of a link while ranks computed: `seconds` with a message under way, bytes, and messages."""

    seconds: float
    nbytes: float
    messages: int


def fitted(few: LinkUse, many: LinkUse, idle: Link) -> Link:
    """The cost of a message while ranks compute, fitted to rounds of few messages and of many.

    It is at least that of an `idle` link, and more if ranks share cores with the threads that carry messages.
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
    """The messages in the order of sending, each with its parameters in the order of backward.

    The members of a message are names of parameters, or NAME[START:STOP] for a slice: see `session.buckets`.
    """

    messages: tuple[tuple[str, ...], ...]


def merged(gradients: Sequence[Gradient], link: Link) -> MessagePlan:
    """Join neighbours so that the last message arrives as early as possible.

    `gradients`: in the order of backward. A message is sent when all of it is ready and the link is free, and
    the gradients of one lie in one of DDP's buckets. MG-WFBP (Shi, Chu & Li, INFOCOM 2019) goes through the
    layers once, and joins one with the next if that wait is shorter than the latency saved; a chain of such
    waits can add up. So here all partitions are compared, by dynamic programming: if the first k gradients
    arrive earlier, the others never arrive later. Of partitions that end at the same time, the one with the
    fewest messages is taken.
    """
    through: list[tuple[float, int]] = [(0.0, 0)]  # of the first k: arrival, messages
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
    """Of the messages that are ready, send first the one that the next forward pass needs first.

    `gradients`: in the order of backward. Neighbours are joined up to `most` bytes, and larger ones are cut;
        None: a size that makes the latency a small part of a message. A link takes one message at a time, or
        as many as `credit` bytes allow, which then share it. With `split` the first halves are sent in the
        order of backward, and the second halves in that of the next forward pass.
    """
    if most is None:
        most = min(max(_SMALL_SHARE * link.latency * link.rate, _SHORTEST), _LONGEST)
    joined = _up_to(most, [part for each in gradients for part in each.slices(most)])
    if split:
        return MessagePlan(tuple(_names(each) for each in joined))
    whole = [_joined(each) for each in joined]
    return MessagePlan(tuple(_names(joined[i]) for i in _order(whole, link, credit)))


def by_size(gradients: Sequence[Gradient], most: float) -> MessagePlan:
    """Join neighbours up to `most` bytes, and send them in the order of backward."""
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
    """The order of sending, simulated: whenever the link has room, the most urgent ready message is sent."""
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
        ahead = max(0.0, credit - messages[chosen].nbytes)  # more bytes may be sent meanwhile
        now += max(0.0, link.seconds(messages[chosen].nbytes) - ahead / link.rate)
    return order


def _names(gradients: Sequence[Gradient]) -> tuple[str, ...]:
    return tuple(each.name for each in gradients)
