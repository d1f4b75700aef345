"""`lowbit` on four real processes over Gloo."""

import pytest
from lowbit_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("lowbit_checks.py", 4)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)
