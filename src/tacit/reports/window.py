"""Which steps of a run the page draws: a few around the middle, with a round of every level among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tacit.timelines import Timeline

__all__ = ["RANKS", "Window", "cut"]

LEAST, MOST = 6, 30
"""Steps in a window."""
RANKS = 8
"""Ranks that are drawn of more."""
BARS = 240
"""Ranks times steps that are drawn: a page of many algorithms must stay small."""


class Window(NamedTuple):
    """Some steps of some ranks, whose times count from the beginning of the first of them."""

    timelines: tuple[Timeline, ...]
    first: int
    last: int
    ranks: int


def cut(timelines: Sequence[Timeline]) -> Window | None:
    """The window of one run's timelines; None where no step is known."""
    shown = _spread(sorted(timelines, key=lambda each: each.rank))
    steps = [each.step for each in shown[0].steps] if shown else []
    if not steps:
        return None
    count = min(_wanted(shown[0]), max(LEAST, BARS // len(shown)))
    middle = _middle(shown[0], steps)
    first = max(steps[0], min(middle - count // 2, steps[-1] + 1 - count))
    parts = [each.within(first, first + count) for each in shown]
    last = max(step.step for each in parts for step in each.steps)
    start = min(each.origin + each.steps[0].begun for each in parts if each.steps)
    return Window(tuple(each.counted_from(start) for each in parts), first, last, len(timelines))


def _spread(timelines: Sequence[Timeline]) -> list[Timeline]:
    """So many of them as are drawn, the first and the last among them."""
    if len(timelines) <= RANKS:
        return [*timelines]
    return [timelines[i * (len(timelines) - 1) // (RANKS - 1)] for i in range(RANKS)]


def _rarest(timeline: Timeline) -> list[int]:
    """The steps in which rounds of the level left that has the fewest of them."""
    found = [
        sorted({each.step for each in timeline.exchanges if each.level == level})
        for level in range(len(timeline.levels))
    ]
    return min(filter(None, found), key=len, default=[])


def _wanted(timeline: Timeline) -> int:
    """A period of the rarest level, and some steps around it."""
    gaps = [after - before for before, after in pairwise(_rarest(timeline))]
    period = sorted(gaps)[len(gaps) // 2] if gaps else 0
    return max(LEAST, min(period + LEAST, MOST))


def _middle(timeline: Timeline, steps: Sequence[int]) -> int:
    """The middle, or the round of the rarest level that is nearest to it."""
    middle = steps[len(steps) // 2]
    return min(_rarest(timeline), key=lambda step: abs(step - middle), default=middle)
