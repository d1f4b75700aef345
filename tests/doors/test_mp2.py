"""`mp2` on four and seven real processes over Gloo."""

import pytest
from launching import Ended, assert_passed, ranks
from mp2_checks import CHECKS


@pytest.fixture(scope="module", params=[4, 7])
def ended(request: pytest.FixtureRequest) -> list[Ended]:
    return ranks("mp2_checks.py", request.param, seconds=240)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)
