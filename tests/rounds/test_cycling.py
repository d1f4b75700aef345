"""DASO's schedule, against the event lists that its authors' code gives (Heat, `dp_optimizer.py`)."""

import math

import pytest
import torch

from cases import for_each
from tacit.contracts import Application, ScheduleState
from tacit.errors import ConfigError
from tacit.merges import StaleMean
from tacit.rounds import Cycling, NodeRounds

G = 4
LAST = 9


def schedule_state(
    schedule: Cycling, steps: int = LAST + 1, epochs: int = 10, **other: float
) -> ScheduleState:
    return {**schedule.start(), "steps_per_epoch": steps, "epochs": epochs, **other}


def events(
    schedule: Cycling, schedule_state: ScheduleState, first: int = 0, count: int = LAST + 1
) -> list[list[str]]:
    """What happens after each batch: `send 1`, by group 1; `recv 0 lag 1`, or `average 1`, which blocks."""
    under_way: list[tuple[int, int, int]] = []  # group, sent, lands
    found = []
    for step in range(first, first + count):
        now = []
        sync = schedule.at(step, schedule_state)
        if sync is not None:
            assert sync.round_index is not None
            group, apply_at = sync.round_index % G, sync.apply_at
            now.append(f"average {group}" if apply_at == step else f"send {group}")
            under_way.append((group, step, apply_at))
        for way in [way for way in under_way if way[2] == step]:
            under_way.remove(way)
            if way[1] < step:
                now.append(f"recv {way[0]} lag {step - way[1]}")
        found.append(now)
    assert not under_way
    return found


def cycling(period: int, delay: int, local: int) -> tuple[Cycling, ScheduleState]:
    schedule = Cycling(4, warmup_epochs=0, cooldown_epochs=0)
    return schedule, schedule_state(schedule, period=period, delay=delay, local=local)


def test_every_fourth_batch() -> None:
    assert events(*cycling(4, 1, 1)) == [
        ["send 0"],
        ["recv 0 lag 1"],
        [],
        [],
        ["send 1"],
        ["recv 1 lag 1"],
        [],
        [],
        ["send 2"],
        ["average 3", "recv 2 lag 1"],
    ]


def test_every_second_batch_lands_as_the_next_one_leaves_and_the_lag_is_two() -> None:
    assert events(*cycling(2, 1, 1)) == [
        ["send 0"],
        [],
        ["send 1", "recv 0 lag 2"],
        [],
        ["send 2", "recv 1 lag 2"],
        [],
        ["send 3", "recv 2 lag 2"],
        [],
        ["send 0", "recv 3 lag 2"],
        ["average 1", "recv 0 lag 1"],
    ]


def test_every_batch() -> None:
    found = events(*cycling(1, 1, 1))
    assert found[:3] == [["send 0"], ["send 1", "recv 0 lag 1"], ["send 2", "recv 1 lag 1"]]
    assert found[LAST] == ["average 1", "recv 0 lag 1"]


def test_every_eighth_batch_lands_two_later() -> None:
    schedule, after = cycling(8, 2, 2)
    found = events(schedule, after)
    assert found[:8] == [["send 0"], [], ["recv 0 lag 2"], *([[]] * 5)]
    assert found[8:] == [["send 1"], ["average 2", "recv 1 lag 1"]]
    inside = [NodeRounds(schedule).at(step, after) is not None for step in range(LAST + 1)]
    # From the landing on by turns, and always before the next round leaves and at the epoch's end.
    assert inside == [True, True, True, False, True, False, True, False, True, True]


def test_epochs_begin_anew_with_the_first_group() -> None:
    schedule, after = cycling(4, 1, 1)
    assert events(schedule, after, first=LAST + 1) == events(schedule, after)


def test_blocking_phases_and_the_ends_of_epochs_apply_at_once() -> None:
    schedule = Cycling(warmup_epochs=1, cooldown_epochs=2)
    after = schedule_state(schedule, epochs=5)
    every = [[f"average {k % G}"] for k in range(LAST + 1)]
    for epoch in (0, 3, 4, 5):  # one more than was said is cool-down too
        assert events(schedule, after, first=epoch * (LAST + 1)) == every
    assert events(schedule, after, first=LAST + 1)[0] == ["send 0"]
    assert schedule.phases(after) == ((10, False), (20, True), (10, False))


@pytest.mark.parametrize(("epochs", "blocking"), [(1, 0), (9, 0), (10, 1), (39, 3), (40, 4), (90, 4)])
def test_a_tenth_of_the_epochs_warms_up_and_cools_down(epochs: int, blocking: int) -> None:
    schedule = Cycling()
    (warm, _), (_, _), _ = schedule.phases(schedule_state(schedule, epochs=epochs))
    assert warm == blocking * (LAST + 1)


def test_no_warm_up_begins_with_cycling() -> None:
    schedule = Cycling(warmup_epochs=0)
    assert events(schedule, schedule_state(schedule))[:2] == [["send 0"], ["recv 0 lag 1"]]


def test_blocking_may_be_all_there_is() -> None:
    schedule = Cycling(warmup_epochs=4, cooldown_epochs=4)
    after = schedule_state(schedule, epochs=3)
    assert all(found[0].startswith("average") for found in events(schedule, after, count=30))


# ---- plateaus -----------------------------------------------------------------------------------------


def observes(schedule: Cycling, step: int, now: ScheduleState) -> bool:
    sync = schedule.at(step, now)
    return sync is not None and sync.observe


def after_epochs(schedule: Cycling, losses: list[float], first: int = 0) -> list[tuple[float, float, float]]:
    """(B, W, L) after each cycling epoch."""
    now = schedule_state(schedule, epochs=1000)
    found = []
    for epoch, loss in enumerate(losses, first):
        step = (epoch + 1) * (LAST + 1) - 1
        assert observes(schedule, step, now)
        now = schedule.observe(now, {"step": step, "lr": 0.1, "loss": loss})
        found.append((now["period"], now["delay"], now["local"]))
    return found


def test_the_third_epoch_in_a_row_without_improvement_is_a_plateau() -> None:
    schedule = Cycling(warmup_epochs=0)
    assert after_epochs(schedule, [1.0, 1.0, 1.0, 1.0]) == [(4, 1, 1)] * 3 + [(2, 1, 1)]
    # 5 % better than the best is not better; a little more is.
    assert after_epochs(schedule, [1.0, 0.95, 0.951, 0.949, 0.949])[-1] == (4, 1, 1)


def test_periods_halve_and_begin_again() -> None:
    found = after_epochs(Cycling(warmup_epochs=0), [1.0] * 19)
    assert found[3::3] == [(2, 1, 1), (1, 1, 1), (8, 2, 2), (4, 1, 1), (2, 1, 1), (1, 1, 1)]
    assert after_epochs(Cycling(warmup_epochs=0, most=4), [1.0] * 10)[-1] == (4, 1, 1)
    assert after_epochs(Cycling(warmup_epochs=0, most=2), [1.0] * 10)[-1] == (2, 1, 1)


def test_the_delay_stays_below_the_period() -> None:
    found = after_epochs(Cycling(16, 12, 8, warmup_epochs=0), [1.0] * 13)
    assert found[3::3] == [(8, 7, 4), (4, 3, 2), (2, 1, 1), (1, 1, 1)]


def heats(losses: list[float], warm: int, cool: int, total: int) -> list[tuple[int, int, int]]:
    """(B, W, L) after each epoch, by Heat's `epoch_loss_logic`; (0, 0, 0) is blocking."""
    gs, wait, local, best, bad = 0, 0, 0, math.inf, 0
    found = []
    for epoch, loss in enumerate(losses, 1):  # its counter has moved on when it is told the loss
        if epoch < warm:
            gs, wait, local = 0, 0, 0
        else:
            if epoch == warm:
                gs, wait, local = 4, 1, 1
            if epoch >= total - cool:
                gs, wait, local = 0, 0, 0
            else:
                if warm == 0 and epoch == 1:
                    gs, wait, local = 4, 1, 1  # as ours begins where there is no warm-up
                better = loss < (best * 0.95 if best >= 0 else best * 1.05)
                best, bad = (loss, 0) if better else (best, bad + 1)
                flat, bad = bad > 2, 0 if bad > 2 else bad
                if flat and gs > 1:
                    gs, wait, local = gs // 2, max(1, wait - 1), max(1, local // 2)
                elif flat:
                    gs, wait, local = 8, 2, 2
        found.append((gs, wait, local))
    return found


LOSSES = {
    "flat": [1.0] * 24,
    "falling in the warm-up": [0.9**i for i in range(24)],
    "lowest at the end of the warm-up": [2.0, 1.8, 1.0, 1.2, *[1.1] * 20],
    "negative": [-1.0, -1.04, -1.02, -1.06, *[-1.07 - 0.001 * i for i in range(20)]],
    "below zero later": [1.0, 0.5, 0.1, -0.1, *[-0.1] * 20],
}


@for_each("warm", [0, 1, 3, 4])
@for_each("losses", LOSSES)
def test_plateaus_are_those_of_the_authors_code(losses: str, warm: int) -> None:
    cool, total = 2, 24
    schedule = Cycling(warmup_epochs=warm, cooldown_epochs=cool)
    now, found = schedule_state(schedule, epochs=total), []
    for epoch, loss in enumerate(LOSSES[losses]):
        now = schedule.observe(now, {"step": (epoch + 1) * (LAST + 1) - 1, "lr": 0.1, "loss": loss})
        found.append((now["period"], now["delay"], now["local"]))
    expected = heats(LOSSES[losses], warm, cool, total)
    assert len({each for each in expected if each[0]}) > 1 or losses == "falling in the warm-up"
    for epoch in range(max(warm - 1, 0), total - cool - 1):
        assert found[epoch] == expected[epoch], f"after epoch {epoch}"


def test_blocking_epochs_are_not_judged_but_for_the_last_that_warms_up() -> None:
    assert after_epochs(Cycling(warmup_epochs=4), [1.0] * 6) == [(4, 1, 1)] * 6
    assert after_epochs(Cycling(warmup_epochs=4), [1.0] * 7)[-1] == (2, 1, 1)
    assert after_epochs(Cycling(warmup_epochs=4), [0.1] * 3 + [1.0] * 4)[-1] == (2, 1, 1)


def test_the_authors_two_factors_may_be_others() -> None:
    schedule = Cycling(9, 3, 9, most=27, warmup_epochs=0, patience=0, skip_reduction_factor=3)
    assert after_epochs(schedule, [1.0] * 4) == [(9, 3, 9), (3, 2, 3), (1, 1, 1), (27, 6, 6)]
    schedule = Cycling(1, most=8, warmup_epochs=0, patience=0, local_skip_factor=2)
    assert after_epochs(schedule, [1.0] * 2)[-1] == (8, 4, 4)


# ---- chosen -------------------------------------------------------------------------------------------


def chosen(transfer: float) -> ScheduleState:
    schedule = Cycling("auto", warmup_epochs=0, cooldown_epochs=0)
    now = schedule_state(schedule, steps=100)
    assert [step for step in range(13) if schedule.at(step, now)] == [0, 4, 8, 12]
    assert [observes(schedule, step, now) for step in (0, 4, 99)] == [False, True, True]
    now = schedule.observe(now, {"step": 4, "lr": 0.1, "transfer": transfer})
    sync = schedule.at(5 * int(now["period"]), now)
    assert sync is not None
    return {**now, "applied after": sync.apply_at - 5 * int(now["period"])}


@pytest.mark.parametrize(("transfer", "period"), [(0.01, 1), (0.9, 1), (0.95, 2), (3.6, 4), (3.7, 5), (8, 9)])
def test_the_period_is_the_least_that_hides_the_transfer(transfer: float, period: int) -> None:
    now = chosen(transfer)
    assert now["period"] == now["applied after"] == period


def test_nothing_under_way_changes_nothing() -> None:
    assert chosen(0.0)["period"] == 4


def test_a_period_that_was_chosen_is_asked_for_at_the_ends_of_epochs() -> None:
    schedule = Cycling("auto", warmup_epochs=0, cooldown_epochs=0)
    now = schedule_state(schedule, steps=100, asked=2)
    assert [step for step in range(200) if observes(schedule, step, now)] == [99, 199]


# ---- the merge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_the_weight_is_that_of_the_lag(lag: int) -> None:
    sent, then = torch.tensor([0.0, 0.0, 0.0, 4.0]), torch.tensor([7.0])
    now, mean = torch.tensor([1.0]), sent.mean() - then
    StaleMean().apply_(now, then, mean, None, {}, Application(peers=8, lag=lag, parties=4))
    assert then == sent.mean()
    assert now == pytest.approx((2 * lag * 1.0 + float(sent.sum())) / (2 * lag + 4))


def test_what_comes_at_once_is_taken() -> None:
    now, then = torch.tensor([1.0]), torch.tensor([7.0])
    StaleMean().apply_(now, then, torch.tensor([-2.0]), None, {}, Application(peers=8, lag=0, parties=4))
    assert now == then == 5.0


# ---- what cannot be -----------------------------------------------------------------------------------


@for_each(
    ("given", "said"),
    [
        ({"period": 0}, "period=0 is not possible: write 1 or more"),
        ({"period": 4, "delay": 4}, "delay=4 with period=4: answers would be applied after the next"),
        ({"period": 1, "delay": 2}, "Write delay=1 at most"),
        ({"period": "auto", "delay": 2}, "sets when answers are applied, but delay=2, local=1 were given"),
        ({"local": 0}, "local=0 is not possible"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1 is not possible: write 0 or more epochs"),
        ({"threshold": 1.0}, "threshold=1.0 is not possible"),
        ({"skip_reduction_factor": 1}, "skip_reduction_factor=1 is not possible: write 2 or more"),
        ({"local_skip_factor": 0}, "local_skip_factor=0 is not possible: write 2 or more"),
        ({"patience": math.nan}, "patience=nan is not possible"),
    ],
)
def test_refuses_what_cannot_be(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cycling(**given)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_replicas_of_a_node_stay_parted_once_they_were() -> None:
    schedule = Cycling(warmup_epochs=0)
    now, diverged_in_node = schedule_state(schedule, epochs=1000), []
    for epoch in range(16):
        step = (epoch + 1) * (LAST + 1) - 1
        now = schedule.observe(now, {"step": step, "lr": 0.1, "loss": 1.0})
        diverged_in_node.append((now["local"], schedule.sync(step + 1, now).diverged_in_node))
    assert diverged_in_node[0] == (1, False)
    assert diverged_in_node[9] == (2, True)
    assert diverged_in_node[15] == (1, True)
    assert Cycling(8, 2, 2).sync(0, schedule_state(Cycling(8, 2, 2))).diverged_in_node
