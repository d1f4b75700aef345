"""Real ranks that average in pairs or groups: they train, and a dead one is named or left out."""

import pytest
from pairs_on_gloo import CHECKS

from rank_processes import Ended, assert_passed, ranks


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("pairs_on_gloo.py", 4, "checks")


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_a_killed_rank_is_named_by_all_others() -> None:
    ended = ranks("pairs_on_gloo.py", 4, "adpsgd", lost=1)
    for rank in (0, 2, 3):
        assert ended[rank].said, ended[rank].text
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        assert "rank 1 is gone" in str(said["says"])
        assert float(str(said["seconds"])) < 40


def test_a_killed_rank_is_left_out_where_that_is_allowed() -> None:
    ended = ranks("pairs_on_gloo.py", 4, "adpsgd:allow_lost=true", lost=1)
    others = [ended[rank] for rank in (0, 2, 3)]
    assert all(each.said for each in others), [each.text for each in others]
    said = [each.said[0] for each in others]
    assert [each["kind"] for each in said] == [""] * 3, said
    assert [each["steps"] for each in said] == [45] * 3
    assert len({each["sum"] for each in said}) == 1, "the others end equal"
    assert all(any("without rank 1, which is gone" in str(line) for line in each["log"]) for each in said)  # type: ignore[attr-defined]
