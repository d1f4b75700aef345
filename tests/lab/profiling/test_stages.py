"""The clock of stages: whatever threads do, the stages of each add up to its processor time."""

import threading
import time

import pytest

from tacit_lab.profiling.stages import UNATTRIBUTED, StageClock, ThreadStages, cpu_ns


class Readings:
    """A clock that gives these readings, one after the other."""

    def __init__(self, *readings: int) -> None:
        self.readings = [*readings]

    def __call__(self) -> int:
        return self.readings.pop(0)


def here(clock: StageClock) -> ThreadStages:
    return clock.threads[threading.get_native_id()]


def test_a_stage_has_what_is_inside_it_and_in_no_other_stage() -> None:
    clock = StageClock(Readings(5, 7, 10, 20))
    with clock.within("outer"), clock.within("inner"):
        pass
    assert dict(here(clock).totals) == {UNATTRIBUTED: 5, "outer": 2 + 10, "inner": 3}
    assert here(clock).last == sum(here(clock).totals.values()) == 20
    assert here(clock).changes == 4


def test_what_runs_now_counts_for_the_stage_that_it_is_in() -> None:
    clock = StageClock(Readings(5, 9))
    clock.enter("outer")
    assert clock.of(threading.get_native_id(), lambda tid: 8) == {UNATTRIBUTED: 5, "outer": 3}
    clock.leave()
    assert clock.of(threading.get_native_id(), lambda tid: 9) == {UNATTRIBUTED: 5, "outer": 4}
    assert clock.of(12345, lambda tid: 6) == {UNATTRIBUTED: 6}


def test_a_change_while_a_thread_is_read_is_noticed() -> None:
    clock = StageClock(Readings(5, 9))
    clock.enter("outer")
    readings = [9, 11]

    def read(tid: int) -> int:
        if len(readings) == 2:
            clock.leave()
        return readings.pop(0)

    assert clock.of(threading.get_native_id(), read) == {UNATTRIBUTED: 5 + 2, "outer": 4}


def test_a_function_that_fails_has_left_its_stage() -> None:
    clock = StageClock()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        clock.timed(fail, "failing")()
    assert here(clock).nested == []
    assert "failing" in here(clock).totals


def test_steps_of_a_generator_count_and_what_happens_between_them_does_not() -> None:
    clock = StageClock(Readings(0, 1, 10, 13, 20, 27))

    def ask(first: int):  # type: ignore[no-untyped-def]
        answer = yield first
        return answer + 1

    asking = clock.stepwise(ask, "asking")(7)
    assert asking.send(None) == 7
    with pytest.raises(StopIteration) as end:
        asking.send(2)
    assert end.value.value == 3
    assert dict(here(clock).totals) == {UNATTRIBUTED: 0 + 9 + 7, "asking": 1 + 3 + 7}


def test_a_generator_that_is_closed_closes_what_it_stands_for() -> None:
    closed = []

    def ask():  # type: ignore[no-untyped-def]
        try:
            yield 1
        finally:
            closed.append(True)

    asking = StageClock().stepwise(ask, "asking")()
    next(asking)
    asking.close()
    assert closed == [True]


def test_the_clock_of_any_thread_is_the_one_that_it_reads_itself() -> None:
    found, tid, read, end = [], [], threading.Event(), threading.Event()

    def work() -> None:
        sum(range(200_000))
        tid.append(threading.get_native_id())
        found.append(time.thread_time_ns())
        read.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    read.wait()
    seen = cpu_ns(tid[0])
    end.set()
    thread.join()
    assert 0 < found[0] <= seen
    with pytest.raises(OSError, match=r"No such process|Invalid argument"):
        cpu_ns(1 << 22)


def test_stages_of_all_threads_add_up_to_their_clocks() -> None:
    clock, ready, end = StageClock(), threading.Event(), threading.Event()

    def work() -> None:
        with clock.within("working"):
            for _ in range(50):
                clock.timed(sum, "adding")(range(1000))
            ready.set()
            end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert thread.native_id is not None
    seen: list[int] = []
    found = clock.of(thread.native_id, lambda tid: seen.append(cpu_ns(tid)) or seen[-1])  # type: ignore[func-returns-value]
    end.set()
    thread.join()
    assert sum(found.values()) == seen[-1]
    assert found["adding"] > 0
