"""Which gradients travel together, and in which order: by when they are ready, and what links cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

__all__ = ["Gradient", "Link", "MessagePlan", "by_priority", "by_size", "merged"]

_SMALL_SHARE = 20
"""A message takes so many times what it costs before its first byte, where it is to be short."""
_SHORTEST, _LONGEST = 256_000, 4_000_000
"""Bytes of a message, where it is to be short; BytePS cuts at 4,096,000."""


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient.

    Attributes:
        nbytes: that travel for it.
        ready: seconds from the first gradient of a backward pass until this one is there.
        needed: its turn in the next forward pass.
        bucket: which of DDP's buckets it lies in; the gradients of a message lie in one.
    """

    name: str
    nbytes: float
    ready: float
    needed: int = 0
    bucket: int = 0


@dataclass(frozen=True)
class Link:
    """What a message costs: `latency` seconds, and one for each `rate` bytes of a gradient."""

    latency: float
    rate: float

    def seconds(self, nbytes: float) -> float:
        """How long a message takes."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class MessagePlan:
    """The messages in the order in which they leave, each with its parameters as backward has them."""

    messages: tuple[tuple[str, ...], ...]


def merged(gradients: Sequence[Gradient], link: Link) -> MessagePlan:
    """Join gradients where a message of their own would come too late to gain from being one.

    `gradients`: in the order in which backward has them. A message that is ready waits for the gradient
    behind it if the link is still busy when that is ready, or was for all but the latency of one more message
    (MG-WFBP: Shi, Chu & Li, INFOCOM 2019, theorem 1 and algorithm 1).
    """
    messages: list[list[Gradient]] = []
    free = 0.0
    for each in gradients:
        if messages:
            last = messages[-1]
            starts = max(free, last[-1].ready)
            if each.ready < starts + link.latency and each.bucket == last[-1].bucket:
                last.append(each)
                continue
            free = starts + link.seconds(sum(g.nbytes for g in last))
        messages.append([each])
    return MessagePlan(tuple(_names(each) for each in messages))


def by_priority(
    gradients: Sequence[Gradient], link: Link, most: float | None = None, credit: float = 0.0
) -> MessagePlan:
    """Have the message leave first, of those that are ready, which the next forward pass needs first.

    `gradients`: in the order in which backward has them. Neighbours are joined up to `most` bytes; where it
    is None, up to what makes the latency of a message small beside it. A link takes one message at a time, or
    as many as `credit` bytes allow, which then share it.
    """
    if most is None:
        most = min(max(_SMALL_SHARE * link.latency * link.rate, _SHORTEST), _LONGEST)
    joined = _up_to(most, gradients)
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
