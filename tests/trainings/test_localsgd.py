"""Local SGD against a loop that is written out, on real Gloo processes; one launch of four ranks."""

import pytest
from localsgd_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks

WORLD = 4


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("localsgd_checks.py", WORLD)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD
