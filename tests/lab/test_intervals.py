"""Intervals of a few seeds, against a library's."""

import pytest
from scipy import stats

from tacit_lab.intervals import Mean, student


@pytest.mark.parametrize("freedom", [1, 2, 5, 29, 30, 31, 60, 500])
def test_the_quantiles_are_students(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-4)


def test_a_mean_has_its_interval() -> None:
    samples = [0.1, 0.3, 0.2, 0.5]
    low, high = stats.t.interval(0.95, 3, loc=0.275, scale=stats.sem(samples))
    found = Mean.of(samples)
    assert found is not None
    assert found.half is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high), abs=1e-5)


def test_of_one_there_is_none() -> None:
    assert Mean.of([0.5]) == Mean(0.5, None, 1)
    assert Mean.of([]) is None
