"""The formula of members that fail at random, against failures that are drawn."""

import random

import pytest

from tacit_lab.churn_plan import PERIODS, ChurnPlan


def drawn(plan: ChurnPlan, steps: int, rounds: int = 20_000) -> float:
    """The mean wait of a round, where each failure is a number of chance."""
    chance, rate = random.Random(1), plan.replicas / plan.between
    now, last, coming, waited = 0.0, -plan.silence, chance.expovariate(rate), 0.0
    for _ in range(rounds):
        now += steps * plan.step
        ended = now
        while True:
            while coming <= now:
                last, coming = coming, coming + chance.expovariate(rate)
            if now >= last + plan.silence:
                break
            now = last + plan.silence
        waited += now - ended
    return waited / rounds


@pytest.mark.parametrize("steps", [1, 16, 256])
@pytest.mark.parametrize("replicas", [100, 1000])
def test_rounds_wait_as_long_as_where_failures_are_drawn(replicas: int, steps: int) -> None:
    plan = ChurnPlan(replicas, 3600.0, 0.1)
    assert plan.waits(steps) == pytest.approx(drawn(plan, steps), rel=0.1)


def test_who_never_fails_loses_nothing_and_who_always_fails_gets_nowhere() -> None:
    never, always = ChurnPlan(10, 1e12, 0.1), ChurnPlan(10**6, 10.0, 0.1)
    assert [round(never.goodput(steps), 6) for steps in PERIODS] == [1.0] * len(PERIODS)
    assert [always.goodput(steps) for steps in PERIODS] == [0.0] * len(PERIODS)
    assert "for ever" in "\n".join(always.lines())
    assert always.to_json()[0] == {"sync_every": 1, "waits": None, "staleness": 0.0, "goodput": 0.0}


def test_longer_periods_wait_less_often_until_rounds_are_as_long_as_lives() -> None:
    found = [ChurnPlan(1000, 3600.0, 0.1).goodput(steps) for steps in (1, 16, 256, 4096, 65_536)]
    assert found[0] < found[1] < found[2]
    assert found[-1] < found[-2]
