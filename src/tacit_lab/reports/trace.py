"""A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The Trace Event Format: a process for each rank; in it a thread for each level, near to far, whose number is
the level's, and above them training itself. All events are complete ones ("X"), with times in microseconds.
Events of a thread are disjoint or nested, as Perfetto leaves out what overlaps: concurrent rounds of a level
are in separate threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from tacit.timelines import Exchange, Timeline, aligned
from tacit_lab.reports.charts.activity import ActivitySpan, activity_spans, outside, rows, waits

Event: TypeAlias = dict[str, Any]

TRAINING = 99
"""The thread of training itself, of which nobody knows a level."""
BESIDE = 100
"""The difference of the numbers of a level's threads, if its rounds overlap."""
UNKNOWN = "torch's exchange is in these steps, and does not say when"


def trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """The timelines of one run, of any of its ranks, as an object to be written as JSON."""
    timelines = aligned(timelines)
    return {
        "traceEvents": [event for timeline in timelines for event in _events(timeline)],
        "displayTimeUnit": "ms",
        "otherData": {"algorithm": timelines[0].algorithm if timelines else "", "made by": "tacit"},
    }


def _events(timeline: Timeline) -> Iterator[Event]:
    rank = timeline.rank
    yield _named("process_name", rank, 0, name=f"rank {rank}")
    yield _named("process_sort_index", rank, 0, sort_index=rank)
    yield _named("thread_name", rank, TRAINING, name="training")
    yield _named("thread_sort_index", rank, TRAINING, sort_index=-1)
    yield from _training(timeline)
    for level, name in enumerate(timeline.levels):
        of_level = [each for each in timeline.exchanges if each.level == level]
        for i, row in enumerate(rows(of_level) or [[]]):
            tid = level + i * BESIDE
            yield _named("thread_name", rank, tid, name=f"{name} ({i + 1})" if i else name)
            yield _named("thread_sort_index", rank, tid, sort_index=level * BESIDE + i)
            for each in row:
                yield from _exchange(each, name, rank, tid)


def _training(timeline: Timeline) -> Iterator[Event]:
    where = {"pid": timeline.rank, "tid": TRAINING}
    waited = waits(timeline)
    for step in timeline.steps:
        told = {"step": step.step}
        if not timeline.levels:
            yield _event("step", "step", step.begun, step.ended, {**told, "note": UNKNOWN}, **where)
            continue
        yield _event(f"step {step.step}", "step", step.begun, step.ended, told, **where)
        for each in activity_spans(step, waited):
            if each.waiting:
                names = _names(timeline, each)
                yield _event(f"wait for {names}", "exposed", each.begun, each.ended, told, **where)
            else:
                yield _event("compute", "compute", each.begun, each.ended, told, **where)
    for each in outside(timeline.steps, waited):
        names = _names(timeline, each)
        yield _event(f"wait for {names}", "exposed", each.begun, each.ended, {}, **where)


def _names(timeline: Timeline, span: ActivitySpan) -> str:
    return " and ".join(timeline.levels[level] for level in span.levels)


def _exchange(exchange: Exchange, name: str, rank: int, tid: int) -> Iterator[Event]:
    args = {
        "step": exchange.step,
        "round": exchange.round,
        "bytes": exchange.bytes_out,
        "exposed": round(exchange.exposed * 1e6),
        "void": exchange.skipped,
    }
    where = {"pid": rank, "tid": tid}
    yield _event(f"{name} round {exchange.round}", "exchange", exchange.begun, exchange.ended, args, **where)
    for wait in exchange.waits:
        begun, ended = max(wait.begun, exchange.begun), min(wait.ended, exchange.ended)
        if begun < ended:
            yield _event("exposed", "exposed", begun, ended, {}, **where)


def _event(name: str, category: str, begun: float, ended: float, args: Event, *, pid: int, tid: int) -> Event:
    # Both ends are rounded, so that what ended together in seconds does so in microseconds.
    start = round(begun * 1e6)
    duration = round(ended * 1e6) - start
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": duration,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _named(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
