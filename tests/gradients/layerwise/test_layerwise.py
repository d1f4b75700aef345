"""Gradients that leave layer by layer, and steps that wait for the next forward pass; on Gloo."""

import pytest
from layerwise_checks import ALSO_ON_THREE, CHECKS

from rank_processes import Ended, assert_passed, ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def two(folder: str) -> list[Ended]:
    return ranks("layerwise_checks.py", 2, folder)


@pytest.fixture(scope="module")
def three(folder: str) -> list[Ended]:
    return ranks("layerwise_checks.py", 3, folder, *ALSO_ON_THREE)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, two: list[Ended]) -> None:
    assert_passed(name, two)


@pytest.mark.parametrize("name", ALSO_ON_THREE)
def test_on_three(name: str, three: list[Ended]) -> None:
    assert_passed(name, three)


def test_the_ranks_end_well(two: list[Ended], three: list[Ended]) -> None:
    assert {each.code for each in (*two, *three)} == {0}
