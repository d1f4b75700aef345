"""What a round cost: nothing of one round is counted in the next."""

import time

from tacit.session.round_costs import KEPT, CommStats, RoundTimer, joined


def test_a_round_that_landed_before_anybody_waited_exposed_nothing() -> None:
    tally = CommStats()
    for number in range(3):
        watch = RoundTimer()
        watch.begin()
        tally.ended(watch, number, number, 8, skipped=False)
        watch.wait()  # too late: all has landed
        time.sleep(0.01)
    assert [record.exposed_seconds for record in tally.records] == [0.0, 0.0, 0.0]
    assert tally.metrics(3, 16)["compute_share"] == 1.0
    assert tally.metrics(3, 16)["compression"] == 2.0
    # Of a period of ten steps: DDP would have sent in each.
    assert tally.metrics(30, 16)["compression"] == 20.0
    tally.begin_closing()
    tally.sent(100)
    assert tally.metrics(3, 16)["compression"] == 2.0
    assert tally.metrics(3, 16)["closing_bytes_out"] == 100


def test_waiting_is_from_when_it_began_to_the_end() -> None:
    tally, watch = CommStats(), RoundTimer()
    watch.begin()
    watch.wait()
    time.sleep(0.01)
    watch.wait()
    tally.ended(watch, 0, 0, 8, skipped=False)
    (record,) = tally.records
    assert 0.01 <= record.exposed_seconds <= record.seconds


def test_a_round_may_be_waited_for_more_than_once_and_only_that_is_exposed() -> None:
    tally, watch = CommStats(), RoundTimer()
    watch.begin()
    assert watch.wait()
    assert not watch.wait()  # it is waited for already
    watch.go_on()
    time.sleep(0.02)
    assert watch.wait()
    tally.ended(watch, 0, 0, 8, skipped=False)
    (record,) = tally.records
    (first, second), span = record.waits, record.span
    assert span.begun <= first.begun <= first.ended <= second.begun - 0.02
    assert second.ended == span.ended
    assert record.exposed_seconds <= record.seconds - 0.02


def test_rounds_and_steps_are_told_by_one_clock() -> None:
    tally, watch = CommStats(), RoundTimer()
    watch.begin()
    tally.ended(watch, 0, 0, 8, skipped=False)
    tally.stepped(1)
    assert [steps for steps, _ in tally.steps] == [0, 1]
    assert tally.steps[0][1] <= tally.records[0].span.begun <= tally.records[0].span.ended
    assert tally.records[0].span.ended <= tally.steps[1][1]


def test_what_is_told_one_by_one_is_bounded() -> None:
    tally = CommStats()
    for number in range(3 * KEPT):
        tally.ended(RoundTimer(), number, number, 8, skipped=False)
        tally.stepped(number + 1)
    assert len(tally.records) == KEPT
    assert len(tally.steps) == KEPT + 1
    assert tally.totals.rounds == 3 * KEPT


def test_levels_together_have_the_numbers_of_each() -> None:
    near, far = CommStats(), CommStats()
    for number in range(3):
        near.ended(RoundTimer(), number, number, 16, skipped=False)
    far.ended(RoundTimer(), 0, 2, 2, skipped=False)
    far.totals.apply(lag=4)
    alone, total = near.metrics(3, 16), joined([near.metrics(3, 16), far.metrics(3, 16)])
    assert alone.keys() <= total.keys()
    assert (total["rounds"], total["bytes_out"], total["lag"]) == (4, 50, 4.0)
    assert total["compression"] == 3 * 16 / 50
    assert joined([CommStats().metrics(0, 16)] * 2)["compression"] == 1.0
    assert CommStats().metrics(3, 16)["compression"] == 1.0
