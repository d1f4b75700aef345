"""Keep the timelines of all ranks from the middle of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from tacit.timelines import Timeline, aligned, now

KEPT = 200
"""Steps around the middle of the run that are written down, so that a long run's file stays small."""


MESSAGES = 40
"""Of these, the steps of which planned messages are written down too: there may be dozens in a step."""


class Timed(Protocol):
    """A session that may keep a timeline."""

    def timeline(self) -> Timeline | None:
        """The timeline of its last steps; None if it keeps none."""


class Timekeeper:
    """Takes the session's timeline once, between epochs, where that costs training nothing.

    All ranks must make the same calls.

    Args:
        steps: Of the whole run.
    """

    def __init__(self, algorithm: str, session: Timed, steps: int) -> None:
        self._algorithm, self._session = algorithm, session
        self._first = max(0, steps // 2 - KEPT // 2)
        self._stop = self._first + KEPT
        self._begun: list[float] = []
        self._kept: Timeline | None = None

    def began(self) -> None:
        """To be called when training starts, also after an evaluation."""
        if not self._begun:
            self._session.timeline()  # what has to be asked for is noted from now on
        self._begun.append(now())

    def paused(self, step: int) -> None:
        """To be called when training pauses after step `step`; keeps the middle of the run once over."""
        if self._kept is None and step >= self._stop:
            last = self._session.timeline()
            self._kept = last and self._middle(last)

    def gather(self) -> list[Timeline]:
        """All ranks' timelines, in order, on rank 0; nothing on the others. A collective call."""
        last = self._session.timeline()
        if last is None:
            return []
        # A schedule is the same on all ranks, and recorded for the whole run.
        changes = last.changes if dist.get_rank() == 0 else ()
        mine = replace(self._kept or self._middle(last), algorithm=self._algorithm, changes=changes)
        everyone: list[Timeline] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone)
        return aligned(everyone or [])

    def _middle(self, timeline: Timeline) -> Timeline:
        return middle(timeline, self._first + KEPT // 2).resumed(self._begun)


def middle(timeline: Timeline, step: int) -> Timeline:
    """What is written down of a timeline: the steps around this one, and some of their planned messages."""
    part = timeline.within(max(0, step - KEPT // 2), step + KEPT // 2)
    half = part.steps[len(part.steps) // 2].step if part.steps else 0
    few = tuple(each for each in part.messages if abs(each.step - half) <= MESSAGES // 2)
    return replace(part, messages=few)
