"""What a session knows of its rounds afterwards: when training waited, and what the schedule chose."""

import time

from replica_threads import Crew, Replica

from tacit.merges import StaleMean
from tacit.reporting.timeline import timeline
from tacit.rounds import Cycling
from tacit.strategy import Strategy


def told(crew: Crew, rank: int = 0):
    return timeline("it", rank, ["exchange"], [crew.replicas[rank].session])


def test_a_schedule_is_logged_where_it_changes_and_only_there() -> None:
    crew = Crew("adacomm:sync_every=4,interval=8")
    crew.train(40, loss=lambda step: 1.0 / (1 + step))
    (first, begun), *later = crew.replicas[0].session.schedule.log
    assert (first, begun) == (0, {"period": 4.0})
    assert later
    periods = [values["period"] for _, values in later]
    assert periods == sorted(periods, reverse=True)
    assert len(set(periods)) == len(periods)
    assert all(
        replica.session.schedule.log == crew.replicas[0].session.schedule.log for replica in crew.replicas
    )
    assert [change.values["period"] for change in told(crew).changes] == [4.0, *periods]
    crew.close()


def test_daso_is_told_by_its_phases_and_by_b_w_and_l() -> None:
    rounds = Cycling(period=4, delay=2, local=1, warmup_epochs=1, cooldown_epochs=1, patience=0)
    strategy = Strategy(subject="delta", rounds=rounds, merge=StaleMean())
    crew = Crew(strategy, schedule_state={"steps_per_epoch": 8.0, "epochs": 6.0})
    crew.train(48, loss=lambda step: 1.0)
    changes = told(crew).changes
    assert [(each.step, each.values["phase"]) for each in changes if "phase" in each.values] == [
        (0, 0.0),
        (8, 1.0),
        (40, 2.0),
    ]
    periods = [each.values for each in changes if "period" in each.values]
    # The epoch that warms up is the best, and every one after it a plateau.
    assert periods == [
        {"period": 4.0, "delay": 2.0, "local": 1.0},
        {"period": 2.0, "delay": 1.0, "local": 1.0},
        {"period": 1.0, "delay": 1.0, "local": 1.0},
        {"period": 8.0, "delay": 2.0, "local": 2.0},
        {"period": 4.0, "delay": 1.0, "local": 1.0},
    ]
    assert [each.step for each in changes] == sorted(each.step for each in changes)
    crew.close()


def test_a_schedule_that_cannot_change_is_not_logged() -> None:
    crew = Crew("localsgd:sync_every=4")
    assert not crew.replicas[0].session.schedule.log
    crew.close()


def test_asking_for_facts_is_waiting_for_the_round_that_is_under_way() -> None:
    """The answer comes behind the round's own messages, so training has waited for these too."""
    crew = Crew("adacomm:sync_every=2")
    crew.train(2, lambda step: 1.0)  # in the first round ranks compare where they begin

    def waits(replica: Replica) -> bool:
        return any(
            flight.waits(time.perf_counter()) for flight in [*replica.session.pending.by_bucket.values()]
        )

    def late(rank: int, replica: Replica) -> None:
        for _ in range(2):
            replica.progress.observations.observe(1.0)
            if replica.session.step == 3 and rank == 2:
                while not waits(crew.replicas[0]):
                    time.sleep(0.001)
                time.sleep(0.2)
            replica.progress.after_step()

    crew.each(late)
    found = told(crew)
    assert abs(found.origin + found.exchanges[0].ended - time.time()) < 60
    _, exchange = found.exchanges
    assert 0.2 <= exchange.exposed <= exchange.ended - exchange.begun
    crew.close()


def test_a_late_round_is_waited_for_within_itself_if_at_all() -> None:
    crew = Crew("overlap-localsgd:sync_every=2")

    def slow(rank: int, replica: Replica) -> None:
        for _ in range(8):
            time.sleep(0.05)
            replica.progress.after_step()

    crew.each(slow)
    exchanges = told(crew).exchanges
    assert [each.step for each in exchanges][:3] == [1, 3, 5]
    for each in exchanges[:3]:
        assert each.begun <= each.ended
        assert all(each.begun <= wait.begun <= wait.ended <= each.ended for wait in each.waits)
    crew.close()
