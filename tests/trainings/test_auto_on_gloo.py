"""`auto` on real processes over Gloo; all checks in one launch of two ranks."""

import pytest
from auto_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks

WORLD = 2


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("auto_checks.py", WORLD)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD
