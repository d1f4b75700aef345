"""Gradients that leave layer by layer, and steps that wait for the next forward pass; on Gloo."""

import pytest
from launching import Ended, assert_passed, ranks
from layerwise_checks import CHECKS

MORE = [
    "training_is_that_of_ddp",
    "accumulation_is_exchanged_once",
    "a_resumed_run_goes_on",
    "a_nan_is_an_error_that_names_its_rank",
]
"""Run on four ranks too, where sums have more than one order; all are on two, where training is DDP's."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return ranks("layerwise_checks.py", 2, str(tmp_path_factory.mktemp("two")), seconds=240)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return ranks("layerwise_checks.py", 4, str(tmp_path_factory.mktemp("four")), *MORE, seconds=240)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, two: list[Ended]) -> None:
    assert_passed(name, two)


@pytest.mark.parametrize("name", MORE)
def test_on_gloo_with_four(name: str, four: list[Ended]) -> None:
    assert_passed(name, four)


def test_the_ranks_end_well(two: list[Ended], four: list[Ended]) -> None:
    assert {each.code for each in two + four} == {0}
