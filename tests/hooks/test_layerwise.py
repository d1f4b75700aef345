"""Gradients that leave layer by layer, and steps that wait for the next forward pass; on Gloo."""

import pytest
from launching import Ended, assert_passed, ranks
from layerwise_checks import CHECKS

PAIR = ("training_is_that_of_ddp", "a_resumed_run_goes_on")
"""What two ranks check, on one node; four on two check all."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return _ended(4, tmp_path_factory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return _ended(2, tmp_path_factory, *PAIR)


def _ended(world: int, folders: pytest.TempPathFactory, *names: str) -> list[Ended]:
    return ranks("layerwise_checks.py", world, str(folders.mktemp("checkpoints")), *names, seconds=240)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


@pytest.mark.parametrize("name", PAIR)
def test_on_a_pair(name: str, pair: list[Ended]) -> None:
    assert_passed(name, pair)


def test_the_ranks_end_well(ended: list[Ended], pair: list[Ended]) -> None:
    assert {each.code for each in (*ended, *pair)} == {0}
