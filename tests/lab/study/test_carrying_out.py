"""Trainings at once, each in a process of its own."""

import os
import signal

from tacit_lab.study.carrying_out import say, train_at_once

KILLED, ODD = 1, 4


class OddError(Exception):
    """Cannot be read back by another process."""

    def __init__(self, *, what: str) -> None:
        super().__init__(what)


def train(job: int) -> int:
    say(f"{job} began")
    if job == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if job == ODD:
        raise OddError(what="no reason")
    return 10 * job


def test_of_one_that_is_killed_or_fails_is_told_and_the_others_end() -> None:
    kept: dict[int, int] = {}
    failed: dict[int, str] = {}
    heard: list[str] = []
    train_at_once(
        lambda: [KILLED, 2, ODD, 3],
        train,
        kept.__setitem__,
        lambda job, error: failed.update({job: str(error)}),
        hear=heard.append,
        jobs=1,
    )
    assert kept == {2: 20, 3: 30}
    assert failed == {
        KILLED: "its process was killed, perhaps as memory ran out",
        ODD: "OddError: no reason",
    }
    assert heard == [f"{job} began" for job in (KILLED, 2, ODD, 3)]
