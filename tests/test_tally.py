"""What a round cost: nothing of one round is counted in the next."""

import time

from tacit.session.tally import Tally, Watch


def test_a_round_that_landed_before_anybody_waited_exposed_nothing() -> None:
    tally = Tally()
    for number in range(3):
        watch = Watch()
        watch.begin()
        tally.ended(watch, number, number, 8, void=False)
        watch.wait()  # too late: all has landed
        time.sleep(0.01)
    assert [record.exposed_seconds for record in tally.records] == [0.0, 0.0, 0.0]
    assert tally.metrics(3, 16)["compute_share"] == 1.0
    assert tally.metrics(3, 16)["compression"] == 2.0


def test_waiting_is_from_when_it_began_to_the_end() -> None:
    tally, watch = Tally(), Watch()
    watch.begin()
    watch.wait()
    time.sleep(0.01)
    watch.wait()
    tally.ended(watch, 0, 0, 8, void=False)
    (record,) = tally.records
    assert 0.01 <= record.exposed_seconds <= record.seconds
