"""What the benchmark of members counts: useful steps, seconds up, pauses, losses at equal samples."""

from __future__ import annotations

import pytest

from elastic import further, pause, up
from tacit_lab.testbed.churn import Churn, ChurnEvent


def steps(*taken: tuple[float, float]) -> list[dict[str, float]]:
    return [{"step": i, "time": time, "round": round} for i, (time, round) in enumerate(taken)]


def test_steps_after_the_last_finished_round_of_a_killed_one_are_not_useful() -> None:
    lines = steps((10, 0), (11, 1), (12, 2), (13, 2))
    assert up(lines, [], 1.0) == (4, 4.0)
    assert up(lines, [ChurnEvent(13.5, 0, "killed"), ChurnEvent(20.0, 0, "back")], 1.0) == (2, 4.5)


def test_a_frozen_one_is_up_before_and_after() -> None:
    lines = steps((10, 0), (11, 1), (12, 2), (22, 3), (23, 4))
    frozen = [ChurnEvent(12.5, 0, "frozen"), ChurnEvent(21.0, 0, "back")]
    assert up(lines, frozen, 1.0) == (5, 5.5)
    assert up(lines[:3], frozen[:1], 1.0) == (3, 3.5)
    earlier = [ChurnEvent(2.0, 0, "killed"), ChurnEvent(5.0, 0, "back")]  # of the process before
    assert up(lines, [*earlier, *frozen], 1.0) == (5, 5.5)


def test_a_pause_is_what_a_step_took_beyond_the_pace() -> None:
    one, other = steps((10, 0), (10.6, 1), (13.6, 2), (14.2, 3)), steps((10, 0), (10.6, 1), (11.2, 2))
    both = {(0, 7): one, (1, 8): other}
    assert pause(both, [], 11.0, 11.5, 0.6) == pytest.approx(2.4)
    assert pause(both, [], 13.7, 13.8, 0.6) == 0.0
    frozen = [ChurnEvent(10.7, 0, "frozen"), ChurnEvent(13.0, 0, "back")]
    assert pause(both, frozen, 11.0, 11.5, 0.6) == 0.0


def test_losses_are_compared_where_as_many_samples_were_trained() -> None:
    calm = {"curve": [(0, 4.0), (100, 2.0), (200, 1.0)]}
    rough = {"curve": [(0, 4.0), (50, 3.03), (100, 2.02), (150, 1.515)]}
    assert further(calm, rough) == pytest.approx(0.01, abs=1e-4)
    assert further(calm, {"curve": []}) is None


def test_a_hub_goes_so_many_seconds_after_all_were_at_work_and_once_each_time() -> None:
    at_work: list[int] = []
    churn = Churn(20.0, 0, lambda: bool(at_work), (5.0, 30.0))
    assert not churn.is_due(1000.0)
    assert not churn.hub_is_due(1000.0)
    at_work.append(1)
    assert not churn.is_due(1001.0)
    due = [at for at in (1005.0, 1006.0, 1007.0, 1030.0, 1031.0, 1040.0) if churn.hub_is_due(at)]
    assert due == [1006.0, 1031.0]
