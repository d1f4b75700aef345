"""What all ranks know together, in worlds of any size."""

import re

import pytest
from replica_threads import Crew

from cases import for_each
from tacit.errors import ConfigError, of_ranks
from tacit.merges import Average, StaleMean
from tacit.rounds import AdaComm, Cycling
from tacit.strategy import Strategy

BY_THE_LOSS = {
    "adacomm": Strategy(subject="delta", rounds=AdaComm(2, interval=2), merge=Average()),
    "daso": Strategy(subject="delta", rounds=Cycling(2, patience=0), merge=StaleMean()),
}


@for_each("name", BY_THE_LOSS)
@for_each("peers", range(1, 33))
def test_a_loss_that_every_rank_has_told_is_known_to_all(name: str, peers: int) -> None:
    crew = Crew(BY_THE_LOSS[name], peers, schedule_state={"steps_per_epoch": 3.0, "epochs": 4.0})
    crew.train(6, loss=lambda step: 1.0)
    memories = [replica.session.schedule.state for replica in crew.replicas]
    crew.close()
    assert all(schedule_state == memories[0] for schedule_state in memories)


@pytest.mark.parametrize("silent", [(3,), (0, 6), range(7)])
def test_who_has_not_told_the_loss_is_named(silent: tuple[int, ...]) -> None:
    crew = Crew(BY_THE_LOSS["adacomm"], 7)

    def work(rank: int, replica) -> None:  # type: ignore[no-untyped-def]
        for _ in range(2):
            if rank not in silent:
                replica.progress.observations.observe(1.0)
            replica.progress.after_step()

    where = "at all" if len(silent) == 7 else f"on {of_ranks(silent)}"
    says = re.escape(f"session.observe(loss) was not called {where}: call it in every step, on every rank")
    with pytest.raises(ConfigError, match=says):
        crew.each(work)
