"""Periods that follow the learning rate, against the rule of their paper."""

import math
from collections.abc import Callable

import pytest
import replica_threads
from replica_threads import Crew

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit.merges import Average
from tacit.rounds import ByLearningRate
from tacit.strategy import Strategy


def periods_of(rounds: ByLearningRate, rates: list[float]) -> list[float]:
    """What it says of rates that it is told one after another."""
    schedule_state, found = rounds.start(), []
    for step, lr in enumerate(rates):
        schedule_state = rounds.observe(schedule_state, {"step": step, "lr": lr})
        found.append(schedule_state["period"])
    return found


def trained(rate: Callable[[int], float], rounds: ByLearningRate, steps: int, stop: int = 0) -> list[int]:
    """After which steps rounds leave; with `stop`, in two trainings with a checkpoint between them."""
    strategy = Strategy(subject="delta", rounds=rounds, merge=Average())
    found, replicas = [], Crew(strategy, 3)
    for step in range(steps):
        if step == stop > 0:
            saved = [replica.save() for replica in replicas.replicas]
            replicas.close()
            replicas = Crew(strategy, 3)
            replicas.each(lambda rank, replica: replica.load(saved[rank]))  # noqa: B023
        replica_threads.LR = rate(step)
        before = replicas.replicas[0].session.schedule.state["last"]
        replicas.train(1)
        if replicas.replicas[0].session.schedule.state["last"] != before:
            found.append(step)
        assert len({replica.session.schedule.state["last"] for replica in replicas.replicas}) == 1
    replicas.close()
    return found


@pytest.fixture(autouse=True)
def _rate_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_threads, "LR", replica_threads.LR)


def test_the_period_is_the_papers_from_the_largest_rate_on() -> None:
    alpha, base = 0.0175, 4
    rates = [0.008 * 0.5 * (1 + math.cos(math.pi * t / 100)) for t in range(100)]
    found = periods_of(ByLearningRate(base, alpha, longest=10_000), rates)
    papers = [max(base, math.floor((alpha / lr) ** 2)) for lr in rates]
    assert found[0] == base
    assert found[1:] == [float(min(each, 10_000)) for each in papers[1:]]
    assert papers[50] > 4 * papers[0]


def test_without_alpha_it_grows_from_the_shortest_by_the_inverse_square() -> None:
    assert periods_of(ByLearningRate(3), [0.3, 0.3, 0.3 / 2**0.5, 0.15, 0.1, 0.01, 0.0]) == [
        *(3.0, 3.0, 6.0, 12.0, 27.0, 128.0, 128.0),
    ]
    assert periods_of(ByLearningRate(1, longest=8), [1.0, 0.51, 0.5, 0.34, 0.3]) == [1.0, 3.0, 4.0, 8.0, 8.0]


def test_a_warm_up_has_the_shortest_period_with_and_without_alpha() -> None:
    warm = [1e-6, 0.01, 0.02, 0.1]
    for alpha in (None, 0.2):
        found = periods_of(ByLearningRate(2, alpha), [*warm, 0.1, 0.05])
        assert found[:4] == [2.0] * 4
        assert found[4:] == ([2.0, 8.0] if alpha is None else [4.0, 16.0])


def test_rounds_leave_as_the_rate_falls_and_a_checkpoint_knows_when_the_next_is_due() -> None:
    def halves(step: int) -> float:
        return 0.1 * 0.5 ** (step // 8)

    rounds = ByLearningRate(2, longest=16)
    expected = [1, 3, 5, 7, 9]  # the round behind step 9 is the first that sees half the rate: 8 steps
    expected += [17]  # a quarter of it: 32, so 16 at most
    expected += [33, 49]
    assert trained(halves, rounds, 50) == expected
    for stop in (9, 10, 14, 30):
        assert trained(halves, rounds, 50, stop) == expected


def test_ranks_with_rates_of_their_own_go_by_the_largest() -> None:
    replicas = Crew("qsr:sync_every=1", 3)
    for rank, replica in enumerate(replicas.replicas):
        rates = iter([0.4, *[0.1 * (rank + 1)] * 20])
        replica.progress.observations._lr = lambda rates=rates: next(rates)
    replicas.train(6)
    states = [replica.session.schedule.state for replica in replicas.replicas]
    replicas.close()
    assert [state["largest"] for state in states] == [pytest.approx(0.4)] * 3
    assert [state["period"] for state in states] == [1.0] * 3  # by 0.3, where the first rank has 0.1
    assert states[0]["last"] == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qsr:sync_every=0", "sync_every=0"),
        ("qsr:alpha=0", "alpha=0"),
        ("qsr:alpha=-1", "alpha=-1"),
        ("qsr:alpha=nan", "alpha=nan"),
        ("qsr:longest=3", "longest=3 is not a whole number, 4 or more"),
        ("qsr:bits=1", "bits=1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)
