"""Real processes over Gloo; checks in one launch of four ranks or of two, and once more with one."""

from pathlib import Path

import pytest
from gloo_checks import CHECKS, PAIRED

from rank_processes import Ended, assert_passed, ranks

WORLD = 4


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return ranks("gloo_checks.py", WORLD, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


@pytest.mark.parametrize("name", PAIRED)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    assert_passed(name, ranks("gloo_checks.py", 2, str(tmp_path)))


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD


def test_a_world_of_one_trains_and_sends_nothing() -> None:
    (alone,) = ranks("world_of_one.py", 1)
    assert alone.code == 0, alone.text
    assert alone.said == [
        {"algorithm": name, "bytes": 0, "same_as_ddp": True}
        for name in ("ddp", "dense", "topk:ratio=1.0", "localsgd")
    ]
