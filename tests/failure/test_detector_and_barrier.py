"""The roll call and the meeting before ranks close, with a thread for each rank and one real store."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tacit.algorithms import parse
from tacit.attaching.failures import without_it
from tacit.errors import PeerLost, RatesDiffer, UnevenData
from tacit.failure import barrier, detector
from tacit.failure.barrier import StepsReached
from tacit.failure.detector import FailureDetector, Member, RankProgress
from tacit.failure.store_comparison import StepComparison, StepNote


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(detector, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(barrier, "SILENT_SECONDS", 1.5)


class Ranks:
    """Some ranks: how far each is, and of what each was alarmed."""

    def __init__(self, count: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
        self.reached = [StepsReached(0)] * count
        self.alarms: dict[int, PeerLost] = {}
        self.calls = [
            FailureDetector(
                self.store,
                "key",
                Member(rank, [*range(count)]),
                RankProgress(lambda: 0, self._reader(rank)),
                self._alarm(rank),
            )
            for rank in range(count)
        ]
        self.pool = ThreadPoolExecutor(count)

    def _reader(self, rank: int) -> Callable[[], StepsReached]:
        return lambda: self.reached[rank]

    def _alarm(self, rank: int) -> Callable[[PeerLost], None]:
        return lambda error: self.alarms.__setitem__(rank, error)

    def close(self, rank: int, after: float = 0.0) -> PeerLost | None:
        """What this rank is told when it closes."""
        time.sleep(after)
        try:
            self.calls[rank].enter_barrier()
            self.calls[rank].leave_barrier()
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
    three.reached = [StepsReached(7, 3)] * 3
    began = time.monotonic()
    assert three.all_close([0.0, 2.5, 1.0]) == [None] * 3  # longer than a silence, but not silent
    assert time.monotonic() - began >= 2.5
    assert not three.alarms


def test_the_one_who_trains_on_tells_all(three: Ranks) -> None:
    """It need not close for that, nor finish its step."""
    three.reached = [StepsReached(95, 5), StepsReached(95, 5), StepsReached(95, 5)]
    first = three.pool.submit(three.close, 2)
    time.sleep(0.3)
    assert not three.alarms
    three.reached[0] = StepsReached(95, 6)
    error = first.result(timeout=5)
    assert isinstance(error, UnevenData)
    assert str(error).startswith("rank 2 closed its session after 95 steps, rank 0 is at step 96: ranks have")
    for _ in range(100):
        if len(three.alarms) == 3:
            break
        time.sleep(0.05)
    assert {str(each) for each in three.alarms.values()} == {str(error)}


def test_one_who_closes_later_after_fewer_steps_is_short(three: Ranks) -> None:
    three.reached = [StepsReached(96), StepsReached(96), StepsReached(94)]
    errors = three.all_close([0.0, 0.2, 0.4])
    assert all(isinstance(error, UnevenData) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "rank 2 closed its session after 94 steps, rank 0 after 96" in str(errors[0])


def test_one_who_is_behind_may_catch_up(three: Ranks) -> None:
    three.reached = [StepsReached(9), StepsReached(4), StepsReached(9)]

    def train_on() -> PeerLost | None:
        for steps in range(5, 10):
            time.sleep(0.1)
            three.reached[1] = StepsReached(steps)
        return three.close(1)

    late = three.pool.submit(train_on)
    others = [three.pool.submit(three.close, rank) for rank in (0, 2)]
    assert [each.result(timeout=10) for each in (*others, late)] == [None] * 3


def test_one_who_closes_while_others_wait_for_it_elsewhere_is_named(three: Ranks) -> None:
    """DDP takes the buffers over from rank 0 in each forward, before a round of ours begins."""
    three.reached = [StepsReached(5, 5)] * 3
    closing = threading.Thread(target=three.close, args=(0,), daemon=True)
    closing.start()
    while not three.calls[1]._store.check(["closing"]):
        time.sleep(0.01)
    error = three.calls[1].alarm("Application timeout caused pair closure")
    assert isinstance(error, UnevenData)
    assert str(error).startswith(
        "rank 0 closed its session after 5 steps, and rank 1 did not follow but failed: ranks have uneven"
    )
    assert str(error).endswith("(rank 1: Application timeout caused pair closure)")
    closing.join(10)


def test_one_who_is_silent_is_named(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "GRACE_SECONDS", 60.0)  # nobody waits for its answer once more
    three.reached = [StepsReached(5)] * 3
    three.calls[1].close()  # its thread ends, as if its process were gone
    errors = [each.result(timeout=15) for each in [three.pool.submit(three.close, rank) for rank in (0, 2)]]
    for error in errors:
        assert isinstance(error, PeerLost)
        assert not isinstance(error, UnevenData)
        assert "rank 1 did not answer" in str(error)


def test_one_who_leaves_with_an_error_is_named(three: Ranks) -> None:
    three.reached = [StepsReached(5)] * 3
    waiting = [three.pool.submit(three.close, rank) for rank in (0, 2)]
    time.sleep(0.2)
    three.calls[1].leave("ValueError: a bad batch")
    for each in waiting:
        assert "rank 1 has left in round 0: ValueError: a bad batch" in str(each.result(timeout=10))


def test_one_who_has_left_is_named_before_one_who_does_not_answer(three: Ranks) -> None:
    three.calls[2].close()  # as if its thread were slow
    waiting = three.pool.submit(three.close, 0)
    three.calls[1].leave("ValueError: a bad batch")
    said = str(waiting.result(timeout=10))
    assert said.startswith("rank 1 has left in round 0: ValueError: a bad batch; rank 2 did not answer"), said


def test_an_error_of_a_ranks_own_is_told_to_all_as_it_is(three: Ranks) -> None:
    found = three.calls[1].alarm("a payload of 5 bytes, where 4 belong", own=True)
    assert str(found) == "round 0 failed on rank 1: a payload of 5 bytes, where 4 belong"
    assert type(found) is PeerLost
    assert str(three.calls[0].alarm("a connection broke")) == str(found), "the first alarm stands"


def test_threads_end(three: Ranks) -> None:
    before = threading.active_count()
    assert three.all_close([0.0] * 3) == [None] * 3
    assert threading.active_count() <= before
    assert not any(call._thread.is_alive() for call in three.calls)


def test_the_error_of_a_lost_rank_says_what_could_go_on_without_it() -> None:
    here = {0: "h5 6 7.0", 2: "h5 6 7.0"}
    for text in ("gossip", "noloco:sync_every=2", "sgp:graph=star"):
        (level,) = parse(text).levels
        said = detector._blamed([0, 1, 2], here, "why", 6.0, without_it(level))
        assert said is not None
        assert said.startswith("rank 1 did not answer in round 5: gone or frozen (why). With '")
        assert said.endswith("attach 'adpsgd:allow_lost=true'")
        assert detector._blamed([0, 2], here, "why", 6.0, without_it(level)) is None
    for text in ("topk", "diloco"):
        (level,) = parse(text).levels
        assert without_it(level) == ""


# ---- who it was ----------------------------------------------------------------------------------------


def verdict(*answers: str, timeout: float = 6.0) -> str:
    """Of ranks 0, 1, 2 that answer so; "" for none."""
    said = {i: each for i, each in enumerate(answers) if each}
    return detector._blamed([0, 1, 2], said, "why", timeout) or detector._nobody(said, "why")


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
            "round 5 failed, and no rank is to blame that is known: all are alive, and what they gave last "
            "they gave within 1.8 s of each other. The error was: why. So look at the network between these "
            "ranks: a link that was down or refused, or that needs longer than the time-out; then write "
            "attach(..., timeout=timedelta(minutes=5)), and so for init_process_group",
        ),
        # A connection broke while one was still computing: that it has given less says nothing.
        (("h5 8 0.1", "h5 6 0.4", "h5 8 0.2"), "round 5 failed, and no rank is to blame that is known"),
        # It gave as much, and at the same time, and then its process was stopped for a while.
        (
            ("h5 8 7.0 0.0", "h5 8 7.0 8.2", "h5 8 7.0 0.0"),
            "rank 1 stood still for 8 s in round 5, as if stopped (why)",
        ),
    ],
)
def test_who_is_missing_is_told_by_the_answers(answers: tuple[str, ...], says: str) -> None:
    found = verdict(*answers)
    assert found == says or (says.endswith("known") and found.startswith(says))


def test_who_failed_first_is_told_where_nobody_is_to_blame() -> None:
    here = dict.fromkeys(range(3), "h5 8 7.0")
    alarm = "rank 2: Connection closed by peer [10.0.0.1]."
    assert detector._blamed([0, 1, 2], here, alarm, 6.0) is None
    says = detector._nobody(here, alarm)
    assert "The first to fail was rank 2, of this: Connection closed by peer [10.0.0.1]. So look" in says


def test_a_rank_whose_process_was_stopped_says_so_itself(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have given the same, at the same time; the clock of one thread jumps."""
    three.reached = [StepsReached(5, 5)] * 3
    for call in three.calls:
        call._timeout = 1.0
    stopped = three.calls[1]._closing
    monkeypatch.setattr(three.calls[1], "_closing", Stopped(stopped, 0.8))
    time.sleep(1.1)
    assert "rank 1 stood still for 1 s in round 0, as if stopped" in str(three.calls[0].alarm("timed out"))


class Stopped:
    """An event, for which was waited so much longer once."""

    def __init__(self, event: threading.Event, seconds: float) -> None:
        self.event, self.seconds = event, seconds
        self.is_set, self.set = event.is_set, event.set

    def wait(self, timeout: float) -> bool:
        seconds, self.seconds = self.seconds, 0.0
        time.sleep(seconds)
        return self.event.wait(timeout)


class Notes:
    """What a rank notes: after each step the same text, or another."""

    def __init__(self, text: str) -> None:
        self.last: StepNote | None = StepNote(8, text)

    def take(self) -> StepNote | None:
        return self.last

    def differ(self, one: int, ones: StepNote, other: int, others: StepNote) -> str | None:
        if ones.text == others.text:
            return None
        return f"{sorted([(one, ones.text), (other, others.text)])} by step {ones.step}"


@pytest.mark.parametrize("when", ["while they train", "as they close"])
def test_notes_that_differ_are_told_to_all(three: Ranks, when: str) -> None:
    three.reached = [StepsReached(8, 8)] * 3
    for call, text in zip(three.calls, ("0.1", "0.1", "0.2"), strict=True):
        comparing = StepComparison(call._store, call._rank, Notes(text))
        if when == "as they close":
            comparing.look = lambda: None  # type: ignore[method-assign]
        call._comparison = comparing
    if when == "as they close":
        told = three.all_close([0.0, 0.1, 0.2])
    else:
        for _ in range(100):
            if len(three.alarms) == 3:
                break
            time.sleep(0.05)
        told = [*three.alarms.values()]
    assert len(told) == 3
    for error in told:
        assert isinstance(error, RatesDiffer)
        assert re.fullmatch(r"\[\([01], '0.1'\), \(2, '0.2'\)\] by step 8", str(error)), str(error)


def test_notes_that_are_alike_are_no_news_nor_are_those_of_another_shard(three: Ranks) -> None:
    three.reached = [StepsReached(8, 8)] * 3
    for call, shard in zip(three.calls, (0, 1, 0), strict=True):
        call._comparison = StepComparison(call._store, call._rank, Notes(f"0.{shard}"), shard)
    time.sleep(0.5)
    assert three.all_close([0.0, 0.1, 0.2]) == [None] * 3
    assert not three.alarms


def test_a_rank_that_begins_late_is_told_from_those_that_waited(three: Ranks) -> None:
    """It has begun as much as they have when it is asked."""
    three.reached = [StepsReached(5, 5)] * 3
    for call in three.calls:
        call._timeout = 1.0
    time.sleep(0.2)
    three.reached[0] = three.reached[2] = StepsReached(5, 6)
    time.sleep(1.2)
    three.reached[1] = StepsReached(5, 6)
    time.sleep(0.2)
    assert "rank 1 did not enter round 0 in time, but some 1 s late" in str(three.calls[0].alarm("timed out"))


def test_a_round_that_is_overdue_is_taken_for_failed(three: Ranks) -> None:
    """A GPU that waits for a peer that is gone raises nothing: the thread that looks says so."""
    three.calls[1].close()  # as if its process were gone
    three.calls[0]._overdue = lambda: "the GPU has not ended an exchange within 20 s"
    for _ in range(200):
        if len(three.alarms) == 2:
            break
        time.sleep(0.05)
    assert {*three.alarms} == {0, 2}
    for error in three.alarms.values():
        assert str(error) == (
            "rank 1 did not answer in round 0: gone or frozen "
            "(rank 0: the GPU has not ended an exchange within 20 s)"
        )


def test_an_alarm_is_known_to_who_asks(three: Ranks) -> None:
    assert three.calls[0].raised() is None
    three.calls[1].close()
    three.calls[2].alarm("a collective failed")
    found = three.calls[0].raised()
    assert str(found) == "rank 1 did not answer in round 0: gone or frozen (rank 2: a collective failed)"
