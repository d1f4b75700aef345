"""The bare hook on real processes over Gloo; all checks in one launch."""

import pytest
from comm_hook_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks

WORLD = 2


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return ranks("comm_hook_checks.py", WORLD, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("killed", "rank 1 did not answer in round 5: gone or frozen"),
        ("raises", "rank 1 has left in round 5: ValueError: a bad batch"),
    ],
)
def test_the_others_name_a_rank_that_goes_wrong(fault: str, says: str) -> None:
    ended = ranks("faulty_comm_hook.py", 3, fault, lost=1)
    for rank in (0, 2):
        assert ended[rank].code == 1, ended[rank].text
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        assert says in str(said["says"]), said
        assert float(str(said["seconds"])) < 25
