"""Timelines: when each rank computed and waited, one JSON object a rank and line.

`Attached.timeline` returns
that of one rank, `tacit compare` saves all of them next to the records, and `tacit_lab.reports` draws it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, get_type_hints

from tacit.errors import ConfigError
from tacit.json_lines import Line, is_of, read_lines

DIGITS = 6
"""Times are stored to the microsecond."""


class Span(NamedTuple):
    """A span of time, in seconds."""

    begun: float
    ended: float


class Step(NamedTuple):
    """A step of the optimizer, from the end of the one before it; the first has the number 0."""

    step: int
    begun: float
    ended: float


class Exchange(NamedTuple):
    """A round on this rank, from its first bucket's start to its last one's landing.

    Attributes:
        level: Counted from the nearest, 0.
        step: How many steps had been taken when it left.
        bytes_out: Sent by this rank, by the formulas of the collectives.
        void: Whether it came to nothing, as a scaled gradient had overflowed.
        waits: When training waited for it; the rest of it was hidden.
    """

    level: int
    step: int
    round: int
    begun: float
    ended: float
    bytes_out: int
    skipped: bool
    waits: tuple[Span, ...]

    @property
    def exposed(self) -> float:
        """Seconds that training waited."""
        return sum(wait.ended - wait.begun for wait in self.waits)


class Change(NamedTuple):
    """A value of a level's schedule that changed with this step."""

    level: int
    step: int
    values: Mapping[str, float]


class PlannedMessage(NamedTuple):
    """A planned message of `fusion` or `priority` on this rank.

    Attributes:
        step: How many steps had been taken when backward made it.
        turn: In which the next forward pass needs it, from 0.
        name: The parameter of it that is needed first, and how many others it has.
        bytes: Of its gradients.
        ready: When its last gradient was there; `left`: when it was sent; `came`: when its mean had arrived.
        waits: When training waited for it.
    """

    step: int
    turn: int
    name: str
    bytes: int
    ready: float
    left: float
    came: float
    waits: tuple[Span, ...]


R = TypeVar("R", Step, Exchange, Change, PlannedMessage)


@dataclass(frozen=True, kw_only=True)
class Timeline(Line):
    """When one rank computed, exchanged and waited.

    Attributes:
        algorithm: The strategy's text.
        rank: Of the default process group.
        origin: Seconds since 1970, from which all other times count. Comparable between ranks of a machine,
            and between machines as far as their clocks are.
        levels: Their names, near to far; none where nothing is exchanged by tacit (`ddp`): it is then not
            known when training waited.
        steps: Those whose beginning is known, in order.
        exchanges: Those that have landed, level by level, in order.
        changes: Of the schedules, in order: "period", "delay" and "local" where a level remembers them, and
            "phase", counted from 0, where it has phases. The first are what it began with.
        messages: Planned ones, step by step; none of other strategies, and in older files.
    """

    kind: ClassVar[str] = "timeline"
    rank: int
    origin: float
    levels: tuple[str, ...]
    steps: tuple[Step, ...]
    exchanges: tuple[Exchange, ...] = ()
    changes: tuple[Change, ...] = ()
    messages: tuple[PlannedMessage, ...] = ()

    def within(self, first: int, stop: int) -> Self:
        """This timeline from step `first` to `stop` - 1, with the exchanges that started or ran then."""
        steps = tuple(each for each in self.steps if first <= each.step < stop)
        begun, ended = (steps[0].begun, steps[-1].ended) if steps else (0.0, 0.0)
        exchanges = tuple(
            each
            for each in self.exchanges
            if first <= each.step < stop or (each.begun < ended and begun < each.ended)
        )
        messages = tuple(each for each in self.messages if first <= each.step < stop)
        return replace(self, steps=steps, exchanges=exchanges, messages=messages)

    def from_step(self, first: int) -> Self:
        """This timeline without the steps before `first`; their exchanges stay."""
        return replace(self, steps=tuple(each for each in self.steps if each.step >= first))

    def resumed(self, times: Iterable[float]) -> Self:
        """This timeline with the steps starting again at these times, in seconds since 1970.

        The time before each belongs to no step: an evaluation between two epochs, for example.
        """
        starts = sorted(at - self.origin for at in times)
        return replace(self, steps=tuple(_later(step, starts) for step in self.steps))

    def counted_from(self, origin: float) -> Self:
        """This timeline with times counted from another origin, to the microsecond."""
        shift = self.origin - origin

        def moved(at: float) -> float:
            return round(at + shift, DIGITS)

        return replace(
            self,
            origin=round(origin, DIGITS),
            steps=tuple(Step(each.step, moved(each.begun), moved(each.ended)) for each in self.steps),
            exchanges=tuple(
                each._replace(
                    begun=moved(each.begun),
                    ended=moved(each.ended),
                    waits=tuple(Span(moved(wait.begun), moved(wait.ended)) for wait in each.waits),
                )
                for each in self.exchanges
            ),
            messages=tuple(
                each._replace(
                    ready=moved(each.ready),
                    left=moved(each.left),
                    came=moved(each.came),
                    waits=tuple(Span(moved(wait.begun), moved(wait.ended)) for wait in each.waits),
                )
                for each in self.messages
            ),
        )

    @classmethod
    def _from_mapping(cls, values: Mapping[str, Any]) -> Self:
        typed = {
            **values,
            "levels": tuple(map(str, _list("levels", values.get("levels")))),
            "steps": _rows(Step, "steps", values),
            "exchanges": _rows(Exchange, "exchanges", values),
            "changes": _rows(Change, "changes", values),
            "messages": _rows(PlannedMessage, "messages", values),
        }
        timeline = super()._from_mapping(typed)
        timeline._check()
        return timeline

    def _check(self) -> None:
        """Refuse an impossible timeline: times that run backwards, levels that do not exist."""
        times = [(step.begun, step.ended) for step in self.steps]
        steps = [step.step for step in self.steps]
        levels = []
        for exchange in self.exchanges:
            times += [(exchange.begun, exchange.ended), *exchange.waits]
            steps.append(exchange.step)
            levels.append(exchange.level)
        for change in self.changes:
            steps.append(change.step)
            levels.append(change.level)
        for message in self.messages:
            times += [(message.ready, message.left), (message.left, message.came), *message.waits]
            steps.append(message.step)
            if message.turn < 0:
                raise ConfigError(f"this Timeline has a message of turn {message.turn}: write 0 or more")
        for begun, ended in times:
            if begun > ended:
                raise ConfigError(f"this Timeline has what begins at {begun} s and ends at {ended} s")
        if min(steps, default=0) < 0:
            raise ConfigError(f"this Timeline has a step {min(steps)}: write 0 or more")
        for level in levels:
            if not 0 <= level < len(self.levels):
                raise ConfigError(f"this Timeline has a level {level}, and names {len(self.levels)}")


def aligned(timelines: Iterable[Timeline]) -> list[Timeline]:
    """All ranks' timelines from the same origin, the earliest beginning of all."""
    timelines = list(timelines)
    starts = [
        timeline.origin + begun
        for timeline in timelines
        for begun in (*(each.begun for each in timeline.steps), *(each.begun for each in timeline.exchanges))
    ]
    return [timeline.counted_from(min(starts, default=timeline.origin)) for timeline in timelines]


def one_after_another(parts: Sequence[tuple[int, Timeline]]) -> Timeline:
    """The timeline of a rank whose strategy was exchanged for another, once or more.

    Args:
        parts: of each strategy, after how many steps it began, and its timeline, in order.
    """
    origin, levels = (
        parts[0][1].origin,
        tuple(dict.fromkeys(name for _, each in parts for name in each.levels)),
    )
    moved = [_moved(each.counted_from(origin), begun, levels) for begun, each in parts]
    return replace(
        moved[-1],
        levels=levels,
        steps=tuple(step for each in moved for step in each.steps),
        exchanges=tuple(sorted((x for each in moved for x in each.exchanges), key=lambda x: x.level)),
        changes=tuple(change for each in moved for change in each.changes),
        messages=tuple(message for each in moved for message in each.messages),
    )


def _moved(timeline: Timeline, steps: int, levels: Sequence[str]) -> Timeline:
    """The timeline with `steps` more steps before it, and with its levels numbered among `levels`."""
    numbers = [levels.index(name) for name in timeline.levels]
    return replace(
        timeline,
        steps=tuple(each._replace(step=each.step + steps) for each in timeline.steps),
        exchanges=tuple(
            each._replace(step=each.step + steps, level=numbers[each.level]) for each in timeline.exchanges
        ),
        changes=tuple(
            each._replace(step=each.step + steps, level=numbers[each.level]) for each in timeline.changes
        ),
        messages=tuple(each._replace(step=each.step + steps) for each in timeline.messages),
    )


def read(path: Path) -> Iterator[Timeline]:
    """Read all timelines of a file, in order.

    Raises:
        ConfigError: The file cannot be read, or a line of it; the message names file and line.
    """
    return read_lines(path, Timeline.from_json)


# ---- one clock ----------------------------------------------------------------------------------------


def now() -> float:
    """Seconds since 1970, by a clock that never turns back."""
    return since_1970(time.perf_counter())


def since_1970(reading: float) -> float:
    """What a reading of `time.perf_counter` is in seconds since 1970."""
    return reading + _anchor()


@cache
def _anchor() -> float:
    """The difference of both clocks, from the least disturbed of a few readings, taken once a process."""
    found = []
    for _ in range(5):
        before, at, after = time.perf_counter(), time.time(), time.perf_counter()
        found.append((after - before, at - (before + after) / 2))
    return min(found)[1]


# ---- rows ---------------------------------------------------------------------------------------------


def _later(step: Step, starts: Sequence[float]) -> Step:
    begun = max((at for at in starts if at <= step.ended), default=step.begun)
    return step._replace(begun=max(step.begun, begun))


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{name} is {value!r:.60} in this Timeline: write a list")
    return value


def _rows(kind: type[R], name: str, values: Mapping[str, Any]) -> tuple[R, ...]:
    return tuple(_row(kind, row) for row in _list(name, values.get(name, [])))


def _row(kind: type[R], row: Any) -> R:
    fields = get_type_hints(kind)
    cells = row if isinstance(row, list) else []
    values = [_typed(name, cell) for name, cell in zip(fields, cells, strict=False)]
    fits = len(cells) == len(fields) and all(
        is_of(value, of) for value, of in zip(values, fields.values(), strict=True)
    )
    if not fits:
        raise ConfigError(f"{row!r:.60} is no {kind.__name__}: write [{', '.join(fields)}]")
    return kind(*values)


def _typed(name: str, cell: Any) -> Any:
    """A cell of a row: lists of pairs as spans, None for a float that is no number, all else unchanged."""
    if name == "waits" and isinstance(cell, list):
        pairs = [each for each in cell if isinstance(each, list) and len(each) == 2 and _numbers(each)]
        return tuple(Span(*pair) for pair in pairs) if len(pairs) == len(cell) else None
    if name == "values" and isinstance(cell, dict):
        return cell if _numbers(cell.values()) else None
    return cell


def _numbers(values: Iterable[Any]) -> bool:
    return all(is_of(value, float) for value in values)
