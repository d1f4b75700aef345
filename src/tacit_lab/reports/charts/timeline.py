"""The chart of what the ranks did over time: a bar for training, and one below it for each level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from tacit.timelines import Exchange, Span, Step, Timeline
from tacit_lab.reports.charts.activity import ActivitySpan, activity_spans, hidden, outside, waits
from tacit_lab.reports.charts.figures import Chart, Figure, Style, tint
from tacit_lab.reports.charts.spans import FAINT, SpanBar, solid, span_trace, striped, time_axis
from tacit_lab.reports.charts.window import Window, cut

TALL, FLAT, SPACE = 22, 11, 13
"""Pixels: of training's bar, of a level's, and between two ranks."""
GAP = 1e-3
"""The least seconds between two steps that are drawn as an evaluation."""


def timeline_chart(
    timelines: Sequence[Timeline], paint: Mapping[str, Style], place: int, alone: float | None = None
) -> Chart | None:
    """The middle of one algorithm's run; None where nothing is known of it.

    Args:
        timelines: Of all its ranks.
        paint: The algorithms' styles.
        place: Of the chart among its like, which makes its key.
        alone: Seconds of a step without communication, by which DDP's are divided; None if not known.
    """
    window = cut(timelines)
    if window is None:
        return None
    algorithm = window.timelines[0].algorithm
    bars, colour = _Bars(window, alone), tint(algorithm, paint)
    plain, stripes = solid(colour), striped(colour)
    faint = {**plain, "opacity": FAINT}
    end = max(step.ended for each in window.timelines for step in each.steps)
    hollow = {"color": "var(--page)", "line": {"color": colour, "width": 1}}
    traces = [
        span_trace(name, [*found], marker)
        for name, found, marker in (
            ("evaluating", bars.evaluations(), {"color": "var(--grid)"}),
            ("computing", bars.training(waiting=False), plain),
            ("waiting", bars.training(waiting=True), stripes),
            ("hidden", bars.exchanges(waiting=False), faint),
            ("exposed", bars.exchanges(waiting=True), stripes),
            ("steps", bars.steps(), hollow),
        )
    ]
    traces[0] |= {"text": "eval", "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    layout: Figure = {
        "barmode": "overlay",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "xaxis": time_axis(end),
        "yaxis": {
            "range": [bars.height, 0],
            "tickvals": [bars.top(i) + TALL / 2 for i in range(len(window.timelines))],
            "ticktext": [f"rank {each.rank}" for each in window.timelines],
            "showgrid": False,
            "fixedrange": True,
        },
        "height": 70 + bars.height,
    }
    return Chart(
        key=f"timeline-{place}",
        title=algorithm,
        note=_note(window, alone),
        figure={"data": [trace for trace in traces if trace["x"]], "layout": layout},
    )


class _Bars:
    """The bars of a window."""

    def __init__(self, window: Window, alone: float | None) -> None:
        self._alone = alone
        self._timelines = window.timelines
        self._levels = window.timelines[0].levels
        self._each = TALL + FLAT * len(self._levels) + SPACE
        self.height = self._each * len(window.timelines)

    def top(self, place: int) -> float:
        """The top of the rank in this place, in pixels."""
        return place * self._each + SPACE / 2

    def training(self, *, waiting: bool) -> Iterator[SpanBar]:
        """The bars of the spans in which training waited, or in which it did not."""
        for place, timeline in enumerate(self._timelines if self._divided else ()):
            waited = self._waits(timeline)
            for step in timeline.steps:
                for begun, ended, levels in activity_spans(step, waited):
                    if bool(levels) == waiting:
                        what = f"waiting for {self._names(levels)}" if waiting else "computing"
                        yield self._upper(place, Span(begun, ended), f"step {step.step}: {what}")
            for begun, ended, levels in outside(timeline.steps, waited) if waiting else ():
                what = f"waiting for {self._names(levels)}, between two steps"
                yield self._upper(place, Span(begun, ended), what)

    def steps(self) -> Iterator[SpanBar]:
        """Bars of whole steps, where their parts are not known."""
        for place, timeline in enumerate(() if self._divided else self._timelines):
            for step in timeline.steps:
                yield self._upper(place, Span(step.begun, step.ended), f"step {step.step}")

    def evaluations(self) -> Iterator[SpanBar]:
        """The bars of the time between two steps in which training did not wait either."""
        for place, timeline in enumerate(self._timelines):
            waited = waits(timeline)
            for before, after in pairwise(timeline.steps):
                for each in activity_spans(Step(after.step, before.ended, after.begun), waited):
                    if not each.waiting and each.ended - each.begun > GAP:
                        told = "evaluation, between two epochs"
                        yield self._upper(place, Span(each.begun, each.ended), told)

    def exchanges(self, *, waiting: bool) -> Iterator[SpanBar]:
        """The bars of rounds, for the spans in which training waited for them, or in which it did not."""
        for place, timeline in enumerate(self._timelines):
            for each in timeline.exchanges:
                for span in each.waits if waiting else hidden(each):
                    yield self._lower(place, each, span, "exposed" if waiting else "hidden")

    @property
    def _divided(self) -> bool:
        """Whether a step's parts are known."""
        return bool(self._levels) or self._alone is not None

    def _waits(self, timeline: Timeline) -> list[ActivitySpan]:
        """When training waited; of DDP, which does not say it, what a step takes beyond computing."""
        if self._levels or self._alone is None:
            return waits(timeline)
        return [
            ActivitySpan(each.begun + self._alone, each.ended, (0,))
            for each in timeline.steps
            if each.ended - each.begun > self._alone
        ]

    def _names(self, levels: Iterable[int]) -> str:
        if not self._levels:
            return "torch's exchange, as it took longer than without"
        return " and ".join(self._levels[level] for level in levels)

    def _upper(self, place: int, span: Span, told: str) -> SpanBar:
        return SpanBar(self.top(place) + TALL / 2, TALL, span, f"rank {self._timelines[place].rank}, {told}")

    def _lower(self, place: int, each: Exchange, span: Span, how: str) -> SpanBar:
        y = self.top(place) + TALL + FLAT * (each.level + 0.5) + 1
        skipped = ", failed: nothing was applied" if each.skipped else ""
        told = f"{self._levels[each.level]} round {each.round} of step {each.step}, {how}{skipped}"
        rank = self._timelines[place].rank
        return SpanBar(y, FLAT - 3, span, f"rank {rank}, {told}: {each.bytes_out / 1e3:,.1f} kB")


def _note(window: Window, alone: float | None) -> str:
    levels, shown = window.timelines[0].levels, len(window.timelines)
    of = "" if shown == window.ranks else f" on {shown} of {window.ranks} ranks"
    steps = f"Steps {window.first} to {window.last}{of}."
    if not levels:
        untold = f"{steps} torch's exchange is inside them, and does not say when training waits for it."
        if alone is None:
            return untold
        return f"{untold} All beyond {1e3 * alone:.1f} ms, a step without exchange, is drawn as waiting."
    if len(levels) == 1:
        return steps
    return f"{steps} Below each rank its levels: {', '.join(levels[:-1])}, and {levels[-1]} lowest."
