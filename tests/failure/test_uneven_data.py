"""Ranks whose loops do not end together: all of them are told, soon, and nobody is told so falsely."""

import pytest

from rank_processes import Ended, ranks

WORLD = 4
SOON = 25
"""Seconds, of which the roll call takes one or two; the groups' time-out is 80."""


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("uneven_data.py", WORLD, "all")


def told(name: str, ended: list[Ended]) -> list[dict[str, object]]:
    found = [[entry for entry in each.said if entry["name"] == name] for each in ended]
    for rank, (entries, each) in enumerate(zip(found, ended, strict=True)):
        assert entries, f"rank {rank} did not get there:\n{each.text[-3000:]}"
    return [entries[0] for entries in found]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dense", "rank 2 closed its session after 7 steps, rank "),
        ("localsgd:sync_every=8", "rank 2 closed its session after 7 steps, rank "),
        ("ednncomm:sync_every=8", "rank 2 closed its session after 7 steps, rank "),
        ("ddp", "rank 2 closed its session after 7 steps, rank "),
        ("scaled", "rank 2 closed its session after 7 steps, rank "),
        ("without a block", "rank 3 closed its session after 9 steps, rank "),
        ("late", "steps, rank 0 "),
    ],
)
def test_uneven_data_is_an_error_on_every_rank(name: str, says: str, ended: list[Ended]) -> None:
    each = told(name, ended)
    assert [entry["kind"] for entry in each] == ["UnevenData"] * WORLD, each
    assert len({str(entry["says"]) for entry in each}) == 1
    assert says in str(each[0]["says"])
    assert "give every rank the same number of batches" in str(each[0]["says"]).lower()
    assert all(float(str(entry["seconds"])) < SOON for entry in each), each


def test_a_rank_may_take_its_time(ended: list[Ended]) -> None:
    assert [entry["kind"] for entry in told("slow", ended)] == ["none"] * WORLD, told("slow", ended)


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("algorithm", ["dense", "localsgd:sync_every=2"])
def test_a_join_context_is_refused(where: str, algorithm: str, ended: list[Ended]) -> None:
    for entry in told(f"join {where} {algorithm}", ended):
        assert entry["kind"] == "AttachError", entry
        assert "torch's Join context" in str(entry["says"])


def test_plain_ddp_works_in_a_join_context(ended: list[Ended]) -> None:
    assert [entry["kind"] for entry in told("join ddp", ended)] == ["none"] * WORLD, told("join ddp", ended)


def test_a_rank_that_dies_while_others_close_is_named() -> None:
    all_ = ranks("uneven_data.py", 3, "killed", lost=1)
    for rank in (0, 2):
        (entry,) = all_[rank].said
        assert entry["kind"] == "PeerLost", entry
        assert "rank 1 did not answer" in str(entry["says"])
        assert "nothing was heard of rank 1 for 4 s" in str(entry["says"])
