"""Ranks that do not mean the same: all of them are told who has what, at attach or while they train."""

import re

import pytest

from rank_processes import Ended, ranks

WORLD = 3


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("disagreeing_ranks.py", WORLD, seconds=200)


def told(name: str, ended: list[Ended]) -> tuple[str, str]:
    """What kind of error every rank had, and its words: the same on all of them."""
    found = [[entry for entry in each.said if entry["name"] == name] for each in ended]
    for rank, (entries, each) in enumerate(zip(found, ended, strict=True)):
        assert entries, f"rank {rank} did not get there:\n{each.text[-3000:]}"
    kinds, words = ({str(entries[0][key]) for entries in found} for key in ("kind", "says"))
    assert len(kinds) == len(words) == 1, found
    return kinds.pop(), words.pop()


@pytest.mark.parametrize(
    ("name", "what", "has"),
    [
        ("ddp here", "strategy", "'topk:ratio=0.1' on ranks 0, 2; 'ddp' on rank 1"),
        ("ddp there", "strategy", "'ddp' on ranks 0, 2; 'localsgd:sync_every=4' on rank 1"),
        ("other arguments", "strategy", "'topk:ratio=0.2' on ranks 0, 2; 'topk:ratio=0.1' on rank 1"),
        ("ddp, rates", "learning rate", "0.05 on ranks 0, 2; 0.01 on rank 1"),
        ("dense, rates", "learning rate", "0.05 on ranks 0, 2; 0.01 on rank 1"),
        ("localsgd, rates", "learning rate", "0.05 on ranks 0, 2; 0.01 on rank 1"),
    ],
)
def test_at_attach_it_is_told_who_has_what(name: str, what: str, has: str, ended: list[Ended]) -> None:
    kind, says = told(name, ended)
    assert kind == "AttachError"
    assert says.startswith(f"ranks [1] attach another {what} than rank 0: give every rank the same one")
    assert f"({has})" in says


@pytest.mark.parametrize("name", ["later, powersgd", "later, localsgd", "later, ddp"])
def test_a_rate_that_one_rank_changes_is_found_while_they_train(name: str, ended: list[Ended]) -> None:
    kind, says = told(name, ended)
    assert kind == "RatesDiffer"
    found = re.match(r"rank (\d) has taken step (\d+) with the learning rate ([\d.]+), rank (\d) with ", says)
    assert found is not None, says
    assert found[3] == ("0.01" if found[1] == "1" else "0.05"), says
    assert "1" in (found[1], found[4]), says
    assert int(found[2]) < 200, "found as they closed, if at all"


def test_a_rate_that_differed_for_some_steps_is_told_at_the_end(ended: list[Ended]) -> None:
    kind, says = told("for a while", ended)
    assert kind == "RatesDiffer"
    at_the_end = r"ranks \d and \d had different learning rates in a step before 13"
    meanwhile = r"rank \d has taken step \d+ with the learning rate 0\.\d+, rank \d with 0\.\d+"
    assert re.match(f"{at_the_end}|{meanwhile}", says), says  # a slow machine lets somebody see it


def test_one_schedule_on_all_ranks_is_fine(ended: list[Ended]) -> None:
    assert told("the same", ended) == ("NoneType", "None")


def test_why_a_rank_closes_its_session_before_the_others_is_told(ended: list[Ended]) -> None:
    kind, says = told("loaded", ended)
    assert kind == "UnevenData"
    assert re.match(
        r"rank 1 closed its session after 6 steps, rank [02] is at step \d+: rank 1 could not take its next "
        r"step: AttachError: the parameters were changed before step 5 by .*: all go on from there then$",
        says,
    ), says


def test_parameters_that_one_rank_writes_alone_are_told_while_they_train_and_as_they_close(
    ended: list[Ended],
) -> None:
    kind, says = told("written, topk", ended)
    assert kind == "Warning"
    texts = says.split(" | ")
    (closing,) = [each for each in texts if "had other bits on" in each]
    found = [each for each in texts if each != closing]
    assert found, "nobody said it while they trained"
    for each in found:
        named = re.match(r"after step (\d+) ranks (\d) and (\d) have other parameters", each)
        assert named is not None, each
        assert "1" in named.group(2, 3)
        assert 10 < int(named[1]) < 50
        assert "dist.broadcast(p.data, src=0)" in each
    assert re.match("after step 50 of 'topk:ratio=0.1' ", closing), closing
    assert "on rank 1 than on rank 0 (nobody had compared before)" in closing
