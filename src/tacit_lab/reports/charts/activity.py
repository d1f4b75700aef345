"""Where the time of a rank went, stretch by stretch: computing, waiting, and what went on meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tacit.timelines import Exchange, Span, Step, Timeline

__all__ = ["Stretch", "hidden", "outside", "rows", "stretches", "waits"]


class Stretch(NamedTuple):
    """A part of a rank's training: computing, or waiting for exchanges of these levels."""

    begun: float
    ended: float
    levels: tuple[int, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether training waited in it."""
        return bool(self.levels)


def waits(timeline: Timeline) -> list[Stretch]:
    """When training waited, in order; waits that overlap, or touch, are one."""
    found: list[Stretch] = []
    for wait, level in sorted((wait, each.level) for each in timeline.exchanges for wait in each.waits):
        if found and wait.begun <= found[-1].ended:
            last = found.pop()
            levels = tuple(sorted({*last.levels, level}))
            found.append(Stretch(last.begun, max(last.ended, wait.ended), levels))
        else:
            found.append(Stretch(wait.begun, wait.ended, (level,)))
    return found


def stretches(step: Step, waits: Iterable[Stretch]) -> list[Stretch]:
    """A step as alternating stretches of computing and waiting, without a gap."""
    found, at = [], step.begun
    for wait in waits:
        begun, ended = max(wait.begun, at), min(wait.ended, step.ended)
        if begun >= ended:
            continue
        if begun > at:
            found.append(Stretch(at, begun))
        found.append(Stretch(begun, ended, wait.levels))
        at = ended
    return [*found, Stretch(at, step.ended)] if at < step.ended else found


def outside(steps: Sequence[Step], waited: Iterable[Stretch]) -> list[Stretch]:
    """Waits between steps, such as before an evaluation or at the end of training."""
    return [
        wait
        for wait in waited
        if not any(wait.begun < step.ended and step.begun < wait.ended for step in steps)
    ]


def hidden(exchange: Exchange) -> list[Span]:
    """The times in which an exchange was in progress and training did not wait for it."""
    found, at = [], exchange.begun
    for wait in exchange.waits:
        if wait.begun > at:
            found.append(Span(at, wait.begun))
        at = max(at, wait.ended)
    return [*found, Span(at, exchange.ended)] if at < exchange.ended else found


def rows(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """The exchanges in as few rows as possible, so that none overlap in a row."""
    found: list[list[Exchange]] = []
    for each in sorted(exchanges, key=lambda exchange: (exchange.begun, exchange.ended)):
        free = next((row for row in found if row[-1].ended <= each.begun), None)
        if free is None:
            found.append([each])
        else:
            free.append(each)
    return found
