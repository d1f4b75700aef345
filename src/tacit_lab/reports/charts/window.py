"""Which steps of a run the page draws: a few around the middle, with a round of every level among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tacit.timelines import Step, Timeline

LEAST, MOST = 6, 30
"""Steps in a window."""
RANKS = 8
"""Ranks that are drawn of more."""
BARS = 240
"""Ranks times steps that are drawn: a page of many algorithms must stay small."""


class Window(NamedTuple):
    """Some steps of some ranks, whose times count from the beginning of the first of them.

    Attributes:
        timelines: Of the ranks that are drawn.
        first: Step; `last`: the last one.
        ranks: How many there are.
    """

    timelines: tuple[Timeline, ...]
    first: int
    last: int
    ranks: int


def cut(timelines: Sequence[Timeline]) -> Window | None:
    """The window of one run's timelines; None where no step is known."""
    shown = _spread(sorted(timelines, key=lambda each: each.rank))
    steps = shown[0].steps if shown else ()
    if not steps:
        return None
    rounds = _rarest(shown[0])
    middle = steps[len(steps) // 2].step
    count = min(_wanted(rounds, middle), max(LEAST, BARS // len(shown)))
    first = _first(steps, rounds, middle, count)
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


def _wanted(rounds: Sequence[int], middle: int) -> int:
    """The longest period around the middle, and some steps more."""
    around = [each for each in rounds if abs(each - middle) <= MOST]
    period = max((after - before for before, after in pairwise(around)), default=0)
    return min(period + LEAST, MOST)


def _first(steps: Sequence[Step], rounds: Sequence[int], middle: int, count: int) -> int:
    """With which step the window begins: a round in it, if it can be no evaluation, and near the middle."""
    breaks = [after.step for before, after in pairwise(steps) if after.begun > before.ended]

    def flaws(first: int) -> tuple[bool, int, int]:
        inside = range(first + 1, first + count)
        lacks = not any(first <= each < first + count for each in rounds)
        return lacks, sum(each in inside for each in breaks), abs(first + count // 2 - middle)

    return min(range(steps[0].step, max(steps[0].step, steps[-1].step + 1 - count) + 1), key=flaws)
