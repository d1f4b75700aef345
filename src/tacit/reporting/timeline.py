"""What this rank was doing when, put together from the sessions of a strategy's levels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tacit.session.session import Session
from tacit.timelines import Change, Exchange, PlannedMessage, Step, Timeline, since_1970


def timeline(
    algorithm: str,
    rank: int,
    names: Sequence[str],
    sessions: Sequence[Session],
    messages: Sequence[PlannedMessage] = (),
) -> Timeline:
    """The last thousand steps, and the last thousand rounds of each level; levels and sessions near to far.

    `messages`: planned messages, timed by the same clock.
    """
    found = zip(names, sessions, strict=True)
    levels = [(name, session) for name, session in found if session.strategy.subject != "nothing"]
    stamps = tuple(sessions[0].stats.steps)
    whole = Timeline(
        algorithm=algorithm,
        rank=rank,
        origin=since_1970(0.0),  # all below is as perf_counter has it
        levels=tuple(name for name, _ in levels),
        steps=tuple(
            Step(before, begun, ended)
            for (before, begun), (after, ended) in pairwise(stamps)
            if after == before + 1
        ),
        exchanges=tuple(
            Exchange(i, each.step, each.round, *each.span, each.bytes_out, each.skipped, each.waits)
            for i, (_, session) in enumerate(levels)
            for each in tuple(session.stats.records)
        ),
        changes=tuple(each for i, (_, session) in enumerate(levels) for each in _changes(i, session)),
        messages=tuple(messages),
    )
    return whole.counted_from(since_1970(stamps[0][1]))


def _changes(level: int, session: Session) -> list[Change]:
    """The changes of the schedule, and the steps from which its phases last."""
    found = [Change(level, step, values) for step, values in tuple(session.schedule.log)]
    starts = enumerate(session.schedule.phase_starts)
    found += [Change(level, start, {"phase": float(number)}) for number, start in starts]
    return sorted(found, key=lambda change: change.step)
