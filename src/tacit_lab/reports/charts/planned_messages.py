"""The chart of planned messages: a lane for each, what the next forward pass needs first at the top."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tacit.timelines import PlannedMessage, Span, Timeline
from tacit_lab.reports.charts.activity import activity_spans, waits
from tacit_lab.reports.charts.figures import Chart, Figure, Style, tint
from tacit_lab.reports.charts.spans import SpanBar, solid, span_trace, striped, time_axis
from tacit_lab.reports.charts.window import cut

STEPS = 3
"""So many are drawn, of one rank: in each there may be dozens of messages."""
LANES = 32
"""The most lanes that are drawn: the first, for which a forward pass waits first."""
TALL, LANE, SPACE = 22, 15, 14
"""Pixels: of training's bar, of a lane, and between the two."""
THICK, THIN = LANE - 4, 3
"""Pixels: of a message that is under way, and of one that is ready."""
LETTERS = 16
"""The most characters of a parameter's name next to its lane; the whole name is under the pointer."""


def lanes_chart(timelines: Sequence[Timeline], paint: Mapping[str, Style], place: int) -> Chart | None:
    """A few steps of one rank of an algorithm's run; None where no planned messages are known.

    Args:
        timelines: Of its ranks.
        paint: The algorithms' styles.
        place: Of the chart among its like, which makes its key.
    """
    timeline = _few_steps(timelines)
    if timeline is None:
        return None
    names = dict(sorted((each.turn, each.name) for each in timeline.messages))
    shown = [each for each in timeline.messages if each.turn in [*names][:LANES]]
    drawn = {turn: name for turn, name in names.items() if turn in [*names][:LANES]}
    colour = tint(timeline.algorithm, paint)
    traces = [
        span_trace(name, [*bars], marker)
        for name, bars, marker in (
            ("computing", _training(timeline, waiting=False), solid(colour)),
            ("waiting", _training(timeline, waiting=True), striped(colour)),
            ("ready", _bars(shown, "ready"), {"color": "var(--dim)"}),
            ("under way", _bars(shown, "under way"), solid(colour)),
            ("waited for", _waited_for(shown), striped(colour)),
        )
    ]
    height, end = TALL + SPACE + LANE * len(drawn), max(step.ended for step in timeline.steps)
    labels = [f"{turn + 1}  {escape(_short(name))}" for turn, name in drawn.items()]
    layout: Figure = {
        "barmode": "overlay",
        "xaxis": time_axis(end),
        "yaxis": {
            "range": [height, -4],
            "tickvals": [TALL / 2, *(_middle(i) for i in range(len(drawn)))],
            "ticktext": ["training", *labels],
            "tickfont": {"size": 11},
            "showgrid": False,
            "fixedrange": True,
        },
        "shapes": [_line(step.begun) for step in timeline.steps],
        "height": 76 + height,
    }
    return Chart(
        key=f"lanes-{place}",
        title=timeline.algorithm,
        note=_note(timeline, len(names) - len(drawn)),
        figure={"data": [trace for trace in traces if trace["x"]], "layout": layout},
    )


def _few_steps(timelines: Sequence[Timeline]) -> Timeline | None:
    """Of the first rank, in the middle of what is drawn of all; with the messages of the step before."""
    window = cut(timelines)
    whole = window.timelines[0] if window else None
    if whole is None or not whole.messages:
        return None
    made = {message.step for message in whole.messages}
    steps = [step.step for step in whole.steps if step.step in made]
    if not steps:
        return None
    first = steps[max(0, len(steps) // 2 - STEPS // 2)]
    # Messages of a step come as late as in the next one.
    part = whole.within(first - 1, first + STEPS)
    part = part.counted_from(part.origin + next(step.begun for step in part.steps if step.step == first))
    return part.from_step(first)


def _middle(lane: int) -> float:
    return TALL + SPACE + LANE * (lane + 0.5)


def _lanes(messages: Sequence[PlannedMessage]) -> Iterator[tuple[PlannedMessage, float]]:
    places = {turn: _middle(i) for i, turn in enumerate(sorted({each.turn for each in messages}))}
    for each in messages:
        yield each, places[each.turn]


def _bars(messages: Sequence[PlannedMessage], what: str) -> Iterator[SpanBar]:
    """The bars of the times for which each message was ready, or under way."""
    for each, y in _lanes(messages):
        span = Span(each.ready, each.left) if what == "ready" else Span(each.left, each.came)
        yield SpanBar(y, THIN if what == "ready" else THICK, span, f"{_told(each)}, {what}")


def _waited_for(messages: Sequence[PlannedMessage]) -> Iterator[SpanBar]:
    for each, y in _lanes(messages):
        for wait in each.waits:
            yield SpanBar(y, THICK, wait, f"{_told(each)}, training waits for it")


def _training(timeline: Timeline, *, waiting: bool) -> Iterator[SpanBar]:
    waited = waits(timeline)
    for step in timeline.steps:
        for each in activity_spans(step, waited):
            if each.waiting == waiting:
                what = "waiting" if waiting else "computing"
                yield SpanBar(TALL / 2, TALL, Span(each.begun, each.ended), f"step {step.step}: {what}")


def _told(message: PlannedMessage) -> str:
    return f"{message.name}, of step {message.step}, {message.bytes / 1e3:,.1f} kB"


def _short(name: str) -> str:
    """The end of a long name, and how many others: `…layer.3.weight +2`."""
    first, _, more = name.partition(" and ")
    shown = first if len(first) <= LETTERS else f"…{first[1 - LETTERS :]}"
    return f"{shown} +{more.partition(' ')[0]}" if more else shown


def _line(at: float) -> Figure:
    """A step begins here."""
    where = {"x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "y domain"}
    return {"type": "line", **where, "line": {"color": "var(--dim)", "width": 1, "dash": "dot"}}


def _note(timeline: Timeline, hidden: int) -> str:
    first, last = timeline.steps[0].step, timeline.steps[-1].step
    more = f" {hidden} more messages, which are needed later, are not drawn." if hidden else ""
    return f"Steps {first} to {last} of rank {timeline.rank}; each begins at a dotted line.{more}"
