"""Gradients that leave layer by layer, and steps that wait for the next forward pass; on Gloo."""

import pytest
from layerwise_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks


@pytest.fixture(scope="module", params=[2, 3])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return ranks("layerwise_checks.py", request.param, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert {each.code for each in ended} == {0}
