import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from cases import for_each
from tacit import timelines
from tacit.errors import ConfigError
from tacit.files import Log
from tacit.timelines import Change, Exchange, PlannedMessage, Span, Step, Timeline

WHOLE = Timeline(
    algorithm="ednncomm",
    rank=1,
    origin=1000.0,
    levels=("near", "far"),
    steps=(Step(0, 0.0, 0.5), Step(1, 0.5, 1.0), Step(2, 1.0, 2.0)),
    exchanges=(
        Exchange(0, 0, 0, 0.1, 0.3, 80, False, (Span(0.2, 0.3),)),
        Exchange(1, 0, 0, 0.4, 1.1, 800, False, (Span(0.4, 0.45), Span(1.05, 1.1))),
        Exchange(0, 2, 1, 1.2, 1.4, 80, True, ()),
    ),
    changes=(Change(1, 0, {"period": 4.0}), Change(1, 2, {"period": 2.0})),
    messages=(PlannedMessage(1, 0, "a.weight and 1 more", 80, 0.6, 0.7, 1.1, (Span(1.0, 1.1),)),),
)


def test_a_timeline_survives_the_way_to_json_and_back() -> None:
    line = WHOLE.to_json()
    assert "\n" not in line
    assert Timeline.from_json(line) == WHOLE


def test_a_file_holds_what_was_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with closing(Log(path)) as log:
        log.write(WHOLE.to_json())
        log.write(WHOLE.counted_from(990.0).to_json())
    assert list(timelines.read(path)) == [WHOLE, WHOLE.counted_from(990.0)]


@for_each(
    ("field", "value", "message"),
    [
        ("steps", 3, "steps is 3 in this Timeline: write a list"),
        ("steps", [[0, 0.0]], r"\[0, 0.0\] is no Step: write \[step, begun, ended\]"),
        ("steps", [[0.5, 0.0, 1.0]], "is no Step"),
        ("exchanges", [[0, 0, 0, 0.1, 0.3, 80, False, [[0.2]]]], "is no Exchange"),
        ("exchanges", [[0, 0, 0, 0.1, 0.3, 80, False, 7]], "is no Exchange"),
        ("exchanges", [[0, 0, 0, 0.1, None, 80, False, []]], "is no Exchange"),
        ("changes", [[0, 0, {"period": "long"}]], "is no Change"),
        (
            "messages",
            [[1, 0, "a", 80, 0.6, 0.7, 1.1]],
            "is no PlannedMessage: write .step, turn, name, bytes, ready",
        ),
        ("messages", [[1, 0, "a", 80, 0.6, 0.5, 1.1, []]], "what begins at 0.6 s and ends at 0.5 s"),
        ("messages", [[1, -1, "a", 80, 0.6, 0.7, 1.1, []]], "a message of turn -1: write 0 or more"),
        ("levels", None, "levels is None in this Timeline: write a list"),
        ("origin", "then", "origin is 'then' in this Timeline: write a finite number"),
        ("version", 99, "version 99.*update tacit"),
    ],
)
def test_what_is_not_of_its_type_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Timeline.from_json(json.dumps(json.loads(WHOLE.to_json()) | {field: value}))


def test_a_part_has_all_that_was_under_way_in_it() -> None:
    part = WHOLE.within(1, 2)
    assert part.steps == WHOLE.steps[1:2]
    assert part.exchanges == WHOLE.exchanges[1:2]  # it left in step 0, and training waits for it in step 2
    assert part.changes == WHOLE.changes
    assert part.messages == WHOLE.messages
    assert WHOLE.within(0, 1).messages == ()
    assert WHOLE.within(7, 9).steps == ()
    assert WHOLE.within(0, 3) == WHOLE


def test_what_came_before_training_began_again_belongs_to_no_step() -> None:
    resumed = WHOLE.resumed([1000.0, 1000.7, 1003.0])
    assert [(each.begun, each.ended) for each in resumed.steps] == [
        (0.0, 0.5),
        (pytest.approx(0.7), 1.0),
        (1.0, 2.0),
    ]


def test_ranks_are_aligned_at_the_earliest_beginning() -> None:
    other = WHOLE.counted_from(900.0)
    late = Timeline(algorithm="ednncomm", rank=0, origin=1005.0, levels=(), steps=(Step(0, 1.0, 2.0),))
    first, second, third = timelines.aligned([other, WHOLE, late])
    assert first == second == WHOLE
    assert third.steps == (Step(0, 6.0, 7.0),)
    assert timelines.aligned([]) == []


def test_the_clock_is_that_on_the_wall_and_never_turns_back() -> None:
    readings = [timelines.now() for _ in range(1000)]
    assert readings == sorted(readings)
    assert abs(readings[-1] - time.time()) < 1
