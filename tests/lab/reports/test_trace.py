"""The traces, held to the rules of the Trace Event Format and to what Perfetto makes of it."""

import json
from itertools import pairwise
from typing import Any

import pytest
from sample_timelines import STEPS, overlapping, run, untold

from tacit.timelines import Exchange, Span, Step, Timeline
from tacit_lab import reports
from tacit_lab.reports.charts.activity import ActivitySpan, activity_spans, hidden, rows, waits
from tacit_lab.reports.trace import TRAINING

RUNS = {"two levels": run("it"), "plain ddp": untold("ddp"), "overlapping": [overlapping("it")]}


def events(timelines: list[Timeline], phase: str = "X") -> list[dict[str, Any]]:
    whole = json.loads(json.dumps(reports.trace(timelines), allow_nan=False))
    assert whole["displayTimeUnit"] in ("ms", "ns")
    return [event for event in whole["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("name", RUNS)
def test_events_are_of_the_format(name: str) -> None:
    complete, metadata = events(RUNS[name]), events(RUNS[name], "M")
    assert len(complete) + len(metadata) == len(reports.trace(RUNS[name])["traceEvents"])
    for event in complete:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == event.keys()
        assert event["name"]
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("ts", "dur", "pid", "tid"))
        assert isinstance(event["args"], dict)
    kinds = {"process_name": "name", "thread_name": "name"}
    kinds |= {"process_sort_index": "sort_index", "thread_sort_index": "sort_index"}
    for event in metadata:
        assert list(event["args"]) == [kinds[event["name"]]]
    named = {(e["pid"], e["tid"]) for e in metadata if e["name"] == "thread_name"}
    assert named >= {(e["pid"], e["tid"]) for e in complete}
    assert len(named) == sum(e["name"] == "thread_name" for e in metadata), "no thread has two names"


@pytest.mark.parametrize("name", RUNS)
def test_in_a_thread_events_lie_side_by_side_or_one_in_the_other(name: str) -> None:
    """Perfetto drops whatever crosses the end of what is around it."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events(RUNS[name]):
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for found in threads.values():
        around: list[int] = []
        for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1] <= event["ts"]:
                around.pop()
            end = event["ts"] + event["dur"]
            assert not around or end <= around[-1], event
            around.append(end)


def test_ranks_are_processes_and_levels_are_threads() -> None:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events(run("it"), "M") if e["name"] == "thread_name"
    }
    assert names == {
        (rank, tid): name
        for rank in range(4)
        for tid, name in ((0, "near"), (1, "far"), (TRAINING, "training"))
    }
    processes = [e["args"]["name"] for e in events(run("it"), "M") if e["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_a_round_has_its_times_its_step_its_bytes_and_what_was_exposed() -> None:
    (first, *_) = [e for e in events(run("it")) if (e["pid"], e["tid"], e["cat"]) == (2, 1, "exchange")]
    assert first["name"] == "far round 0"
    assert (first["ts"], first["dur"]) == (772_000, 30_000)  # in microseconds from the first step of rank 0
    assert first["args"] == {"step": 7, "round": 0, "bytes": 90_000, "exposed": 30_000, "void": False}


def test_training_is_computing_and_waiting_without_a_gap() -> None:
    found = [e for e in events(run("it")) if (e["pid"], e["tid"]) == (0, TRAINING) and e["cat"] != "step"]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(found))
    assert found[0]["ts"] == 0
    assert found[-1]["ts"] + found[-1]["dur"] == STEPS * 100_000
    assert [e["name"] for e in found if e["args"]["step"] == 7] == [
        *("compute", "wait for near", "compute", "wait for far")
    ]


def test_what_plain_ddp_does_inside_of_a_step_is_not_made_up() -> None:
    found = events(untold("ddp"))
    assert {e["cat"] for e in found} == {"step"}
    assert all("does not say when" in e["args"]["note"] for e in found)


def test_waiting_after_the_last_step_is_there_too() -> None:
    (timeline, *_) = run("it", ranks=1)
    end = timeline.steps[-1].ended
    last = Exchange(1, STEPS, 9, end + 0.1, end + 0.2, 8, False, (Span(end + 0.1, end + 0.2),))
    whole = Timeline(**{**vars(timeline), "exchanges": (*timeline.exchanges, last)})
    found = [e for e in events([whole]) if e["tid"] == TRAINING and e["ts"] > round(1e6 * end)]
    assert [(e["name"], e["dur"]) for e in found] == [("wait for far", 100_000)]


# ---- activity_spans ----------------------------------------------------------------------------------------


def of(level: int, begun: float, ended: float, *waits: tuple[float, float]) -> Exchange:
    return Exchange(level, 0, 0, begun, ended, 0, False, tuple(Span(*wait) for wait in waits))


def timeline(*exchanges: Exchange) -> Timeline:
    return Timeline(algorithm="it", rank=0, origin=0, levels=("a", "b"), steps=(), exchanges=exchanges)


def test_waits_that_meet_are_one() -> None:
    found = waits(timeline(of(1, 0, 4, (1, 3)), of(0, 0, 2, (0, 2)), of(0, 5, 6, (5, 6))))
    assert found == [ActivitySpan(0, 3, (0, 1)), ActivitySpan(5, 6, (0,))]


def test_a_step_is_cut_at_its_waits() -> None:
    step, waited = (
        Step(0, 1.0, 5.0),
        [ActivitySpan(0, 2, (0,)), ActivitySpan(3, 4, (1,)), ActivitySpan(4.5, 9, (0,))],
    )
    assert activity_spans(step, waited) == [
        ActivitySpan(1, 2, (0,)),
        ActivitySpan(2, 3),
        ActivitySpan(3, 4, (1,)),
        ActivitySpan(4, 4.5),
        ActivitySpan(4.5, 5, (0,)),
    ]
    assert activity_spans(step, []) == [ActivitySpan(1, 5)]
    assert activity_spans(step, [ActivitySpan(0, 9, (0,))]) == [ActivitySpan(1, 5, (0,))]


def test_hidden_is_what_was_not_waited_for() -> None:
    assert hidden(of(0, 0, 4, (1, 2), (3, 4))) == [(0, 1), (2, 3)]
    assert hidden(of(0, 0, 4)) == [(0, 4)]
    assert hidden(of(0, 0, 4, (0, 4))) == []


def test_rounds_that_overlap_stand_in_rows_of_their_own() -> None:
    a, b, c, d = of(0, 0, 3), of(0, 1, 4), of(0, 3, 5), of(0, 3.5, 6)
    assert rows([d, c, b, a]) == [[a, c], [b], [d]]
