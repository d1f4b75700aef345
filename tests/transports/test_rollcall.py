"""The roll call and the meeting before ranks close, with a thread for each rank and one real store."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tacit.errors import PeerLost, UnevenData
from tacit.transports import closing, rollcall
from tacit.transports.closing import Reached
from tacit.transports.rollcall import RollCall


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(rollcall, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(closing, "SILENT_SECONDS", 1.5)


class Ranks:
    """Some ranks: how far each is, and of what each was alarmed."""

    def __init__(self, count: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
        self.reached = [Reached(0)] * count
        self.alarms: dict[int, PeerLost] = {}
        self.calls = [
            RollCall(
                self.store, "key", rank, [*range(count)], lambda: 0, self._reader(rank), self._alarm(rank)
            )
            for rank in range(count)
        ]
        self.pool = ThreadPoolExecutor(count)

    def _reader(self, rank: int) -> Callable[[], Reached]:
        return lambda: self.reached[rank]

    def _alarm(self, rank: int) -> Callable[[PeerLost], None]:
        return lambda error: self.alarms.__setitem__(rank, error)

    def close(self, rank: int, after: float = 0.0) -> PeerLost | None:
        """What this rank is told when it closes."""
        time.sleep(after)
        try:
            self.calls[rank].meet()
            self.calls[rank].part()
        except PeerLost as error:
            return error
        return None

    def all_close(self, after: list[float]) -> list[PeerLost | None]:
        return [*self.pool.map(self.close, range(len(after)), after)]


@pytest.fixture
def three() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    for call in made.calls:
        call.close()
    made.pool.shutdown()


def test_ranks_that_close_at_different_times_wait_for_each_other(three: Ranks) -> None:
    three.reached = [Reached(7, 3)] * 3
    began = time.monotonic()
    assert three.all_close([0.0, 2.5, 1.0]) == [None] * 3  # longer than a silence, but not silent
    assert time.monotonic() - began >= 2.5
    assert not three.alarms


def test_the_one_who_trains_on_tells_all(three: Ranks) -> None:
    """It need not close for that, nor finish its step."""
    three.reached = [Reached(95, 5), Reached(95, 5), Reached(95, 5)]
    first = three.pool.submit(three.close, 2)
    time.sleep(0.3)
    assert not three.alarms
    three.reached[0] = Reached(95, 6)
    error = first.result(timeout=5)
    assert isinstance(error, UnevenData)
    assert str(error).startswith("rank 2 closed its session after 95 steps, rank 0 is at step 96: ranks have")
    for _ in range(100):
        if len(three.alarms) == 3:
            break
        time.sleep(0.05)
    assert {str(each) for each in three.alarms.values()} == {str(error)}


def test_one_who_closes_later_after_fewer_steps_is_short(three: Ranks) -> None:
    three.reached = [Reached(96), Reached(96), Reached(94)]
    errors = three.all_close([0.0, 0.2, 0.4])
    assert all(isinstance(error, UnevenData) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "rank 2 closed its session after 94 steps, rank 0 after 96" in str(errors[0])


def test_one_who_is_behind_may_catch_up(three: Ranks) -> None:
    three.reached = [Reached(9), Reached(4), Reached(9)]

    def train_on() -> PeerLost | None:
        for steps in range(5, 10):
            time.sleep(0.1)
            three.reached[1] = Reached(steps)
        return three.close(1)

    late = three.pool.submit(train_on)
    others = [three.pool.submit(three.close, rank) for rank in (0, 2)]
    assert [each.result(timeout=10) for each in (*others, late)] == [None] * 3


def test_one_who_is_silent_is_named(three: Ranks) -> None:
    three.reached = [Reached(5)] * 3
    three.calls[1].close()  # its thread ends, as if its process were gone
    errors = [each.result(timeout=15) for each in [three.pool.submit(three.close, rank) for rank in (0, 2)]]
    for error in errors:
        assert isinstance(error, PeerLost)
        assert not isinstance(error, UnevenData)
        assert "rank 1 did not answer" in str(error)


def test_one_who_leaves_with_an_error_is_named(three: Ranks) -> None:
    three.reached = [Reached(5)] * 3
    waiting = [three.pool.submit(three.close, rank) for rank in (0, 2)]
    time.sleep(0.2)
    three.calls[1].leave("ValueError: a bad batch")
    for each in waiting:
        assert "rank 1 has left in round 0: ValueError: a bad batch" in str(each.result(timeout=10))


def test_threads_end(three: Ranks) -> None:
    before = threading.active_count()
    assert three.all_close([0.0] * 3) == [None] * 3
    assert threading.active_count() <= before
    assert not any(call._thread.is_alive() for call in three.calls)


# ---- who it was ----------------------------------------------------------------------------------------


def verdict(*answers: str, timeout: float = 6.0) -> str:
    """Of ranks 0, 1, 2 that answer so; "" for none."""
    return rollcall._verdict([0, 1, 2], {i: each for i, each in enumerate(answers) if each}, "why", timeout)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (("h5 6 7.0", "", "h5 6 7.0"), "rank 1 did not answer in round 5: gone or frozen (why)"),
        (("h5 6 7.0", "lKeyError: 1", "h5 6 7.0"), "rank 1 has left in round 5: KeyError: 1"),
        (
            ("h5 6 7.0", "h4 5 7.0", "h5 6 7.0"),
            "rank 1 did not enter round 5 in time (still in round 4) (why)",
        ),
        (("h5 6 7.0", "h5 5 7.0", "h5 6 7.0"), "rank 1 did not enter round 5 in time (why)"),
        (("h5 6 7.0", "h5 5 7.0", "h5 5 7.0"), "ranks 1, 2 did not enter round 5 in time (why)"),
        (
            ("h5 6 6.5", "h5 6 0.2", "h5 6 7.0"),
            "rank 1 did not enter round 5 in time, but some 7 s late (why)",
        ),
        (
            ("h5 6 6.5", "h5 6 5.2", "h5 6 7.0"),
            "a round failed although every rank is alive and has entered it: why",
        ),
    ],
)
def test_who_is_missing_is_told_by_the_answers(answers: tuple[str, ...], says: str) -> None:
    assert verdict(*answers) == says


def test_a_rank_that_begins_late_is_told_from_those_that_waited(three: Ranks) -> None:
    """It has begun as much as they have when it is asked."""
    three.reached = [Reached(5, 5)] * 3
    for call in three.calls:
        call._timeout = 1.0
    time.sleep(0.2)
    three.reached[0] = three.reached[2] = Reached(5, 6)
    time.sleep(1.2)
    three.reached[1] = Reached(5, 6)
    time.sleep(0.2)
    assert "rank 1 did not enter round 0 in time, but some 1 s late" in str(three.calls[0].alarm("timed out"))
