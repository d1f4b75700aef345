"""Compiled models of several buckets on two real ranks over Gloo; one launch."""

import pytest
from compiled_model_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks

WORLD = 2


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("compiled_model_checks.py", WORLD)


@pytest.mark.parametrize("name", CHECKS)
def test_compiled_it_trains_as_it_does_uncompiled(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD
