"""`mp2` on four real processes over Gloo, and on seven, whose sums round in another way."""

import pytest
from mp2_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks

EXACT = "checksums_are_exact_in_every_type"


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("mp2_checks.py", 4)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_on_seven() -> None:
    assert_passed(EXACT, ranks("mp2_checks.py", 7, EXACT))
