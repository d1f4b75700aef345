"""The lane: starts at once, answers in order, and one failure ends everything with its reason."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tacit.contracts import AllReduce, AxisRank, Collective
from tacit.exchange.lane import Job, Lane


class Slow:
    """A transport whose answers the test gives, in any order."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, int]] = []
        self.calls: dict[tuple[str, int], Callable[[], None]] = {}
        self.failing: set[tuple[str, int]] = set()
        self.news = threading.Condition()

    nodes: tuple[tuple[int, ...], ...] = ()

    def open(self, stages: object) -> None:
        pass

    def ranks(self, axis: str) -> list[int]:
        return [0, 1]

    def place(self, axis: str) -> AxisRank:
        return AxisRank(0, 2)

    def global_rank(self, replica: int) -> int:
        return replica

    def post(self, request: Collective, stage: int, key: str) -> "Answer":
        return Answer(self, (key, stage) if request.axis == "world" else (f"{key} {request.axis}", stage))

    def wait_for(self, *posts: tuple[str, int]) -> None:
        with self.news:
            assert self.news.wait_for(lambda: all(p in self.calls for p in posts), 5), self.posted

    def finish(self, *posts: tuple[str, int]) -> None:
        for post in posts:
            self.calls[post]()


class Answer:
    def __init__(self, net: Slow, key: tuple[str, int]) -> None:
        self.net, self.key, self.sent = net, key, 0

    def on_done(self, call: Callable[[], None]) -> None:
        with self.net.news:
            self.net.posted.append(self.key)
            self.net.calls[self.key] = call
            self.net.news.notify_all()

    def answer(self) -> Any:
        if self.key in self.net.failing:
            raise ConnectionError("the wire is cut")
        return self.key


def talk(axes: tuple[str, ...]):
    for axis in axes:
        yield AllReduce((torch.zeros(1),), axis)


class Watched:
    """A lane with jobs whose ends are written down."""

    def __init__(self) -> None:
        self.net = Slow()
        self.lane = Lane(self.net, lambda error: RuntimeError(f"explained: {error}"))
        self.ends: list[tuple[str, str]] = []

    def submit(self, key: str, *axes: str) -> None:
        self.lane.submit(
            Job(
                key,
                lambda: talk(axes or ("world",)),
                lambda _, __: self.ends.append((key, "landed")),
                lambda error: self.ends.append((key, str(error))),
            )
        )


@pytest.fixture
def watched():
    each = Watched()
    yield each
    each.lane.close()


def test_jobs_start_at_once_and_each_stage_keeps_their_order(watched: Watched) -> None:
    watched.submit("a", "world", "world")
    watched.submit("b", "world", "world")
    watched.net.wait_for(("a", 0), ("b", 0))
    watched.net.finish(("b", 0))  # answered first: its second message is held until a's has left
    watched.submit("c")
    watched.net.wait_for(("c", 0))
    assert watched.net.posted == [("a", 0), ("b", 0), ("c", 0)]
    watched.net.finish(("c", 0))  # it has nothing more to say, and need not wait
    watched.net.finish(("a", 0))
    watched.net.wait_for(("a", 1), ("b", 1))  # while a's second message is still on its way
    assert watched.net.posted[-2:] == [("a", 1), ("b", 1)]
    watched.net.finish(("b", 1), ("a", 1))
    watched.lane.flush()
    assert watched.ends == [("c", "landed"), ("b", "landed"), ("a", "landed")]


def test_the_order_is_kept_axis_by_axis(watched: Watched) -> None:
    net = watched.net
    watched.submit("a", "node", "net", "net", "node")
    watched.submit("b", "node", "net", "node")
    net.wait_for(("a node", 0), ("b node", 0))
    net.finish(("b node", 0), ("a node", 0))
    net.wait_for(("a net", 0), ("b net", 0))
    assert net.posted == [("a node", 0), ("b node", 0), ("a net", 0), ("b net", 0)]
    net.finish(("b net", 0))
    watched.submit("c", "node")
    net.wait_for(("c node", 0))  # by now b's second message on node is held behind a's
    assert ("b node", 1) not in net.posted
    net.finish(("a net", 0))
    net.wait_for(("a net", 1))
    net.finish(("a net", 1))
    net.wait_for(("a node", 1), ("b node", 1))
    assert net.posted[-2:] == [("a node", 1), ("b node", 1)]
    net.finish(("a node", 1), ("b node", 1), ("c node", 0))
    watched.lane.flush()
    assert sorted(watched.ends) == [("a", "landed"), ("b", "landed"), ("c", "landed")]


def test_one_failure_ends_all_with_the_explanation(watched: Watched) -> None:
    watched.submit("a")
    watched.submit("b")
    watched.net.wait_for(("a", 0), ("b", 0))
    watched.net.failing.add(("a", 0))
    watched.net.finish(("a", 0))
    watched.lane.flush()
    watched.submit("c")
    watched.lane.flush()
    watched.net.finish(("b", 0))  # its answer comes too late, and harms nothing
    assert watched.ends == [(key, "explained: the wire is cut") for key in "abc"]


def test_what_an_algorithm_raises_ends_the_lane_too(watched: Watched) -> None:
    def broken():
        raise ZeroDivisionError("in encode")
        yield

    watched.lane.submit(Job("x", broken, lambda _, __: None, lambda e: watched.ends.append(("x", str(e)))))
    watched.lane.flush()
    assert watched.ends == [("x", "explained: in encode")]


def test_closing_drains(watched: Watched) -> None:
    watched.submit("a")
    watched.net.wait_for(("a", 0))
    threading.Timer(0.1, watched.net.finish, [("a", 0)]).start()
    watched.lane.close()
    assert watched.ends == [("a", "landed")]


def test_where_no_thread_begins_any_more_jobs_run_in_the_callers(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12, in atexit

    monkeypatch.setattr(threading.Thread, "start", refused)
    watched.submit("a")
    assert watched.net.posted == [("a", 0)], "by the thread that submits"
    watched.net.finish(("a", 0))
    watched.lane.flush()
    watched.lane.close()
    assert watched.ends == [("a", "landed")]
