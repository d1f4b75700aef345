"""The time of a rank, span by span: computing, waiting, and exchanges meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tacit.timelines import Exchange, Span, Step, Timeline


class ActivitySpan(NamedTuple):
    """A part of a rank's training: computing, or waiting for exchanges of these levels."""

    begun: float
    ended: float
    levels: tuple[int, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether training waited in it."""
        return bool(self.levels)


def waits(timeline: Timeline) -> list[ActivitySpan]:
    """When training waited, in order; waits that overlap, or touch, are one."""
    found: list[ActivitySpan] = []
    for wait, level in sorted((wait, each.level) for each in timeline.exchanges for wait in each.waits):
        if found and wait.begun <= found[-1].ended:
            last = found.pop()
            levels = tuple(sorted({*last.levels, level}))
            found.append(ActivitySpan(last.begun, max(last.ended, wait.ended), levels))
        else:
            found.append(ActivitySpan(wait.begun, wait.ended, (level,)))
    return found


def activity_spans(step: Step, waits: Iterable[ActivitySpan]) -> list[ActivitySpan]:
    """A step as alternating spans of computing and waiting, without a gap."""
    found, at = [], step.begun
    for wait in waits:
        begun, ended = max(wait.begun, at), min(wait.ended, step.ended)
        if begun >= ended:
            continue
        if begun > at:
            found.append(ActivitySpan(at, begun))
        found.append(ActivitySpan(begun, ended, wait.levels))
        at = ended
    return [*found, ActivitySpan(at, step.ended)] if at < step.ended else found


def outside(steps: Sequence[Step], waited: Iterable[ActivitySpan]) -> list[ActivitySpan]:
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
