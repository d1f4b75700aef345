"""`mp2` on four real processes over Gloo; what depends on how sums round, on seven."""

import pytest
from mp2_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks

EXACT = "checksums_are_exact_in_every_type"
OTHERS = [name for name in CHECKS if name != EXACT]


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("mp2_checks.py", 4, *OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_on_seven() -> None:
    assert_passed(EXACT, ranks("mp2_checks.py", 7, EXACT))
