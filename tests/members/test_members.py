"""Replicas that join, leave and die, as processes: those that live go on, and end equal."""

import signal
import time
from collections.abc import Iterator

import pytest
from members_processes import SECONDS, Members, one_dies_and_another_comes, started

KINDS = (
    "lowbit:sync_every=2",  # two phases for three members, and one for two
    "lowbit:sync_every=2,late=1",
    "localsgd:sync_every=4",
    "streaming-diloco:sync_every=12,fragments=2",
    "dense",
    "topk:ratio=0.1",
    "zeroone-adam:sync_every=4",
)


@pytest.fixture
def members() -> Iterator[Members]:
    with started() as all_:
        yield all_


@pytest.mark.parametrize("algorithm", KINDS)
def test_one_dies_and_another_comes(members: Members, algorithm: str) -> None:
    one_dies_and_another_comes(members, algorithm, "semi" if algorithm.startswith("localsgd") else "")


def test_a_frozen_one_is_given_up_and_comes_back(members: Members) -> None:
    a, b, c = (members.member(name, "localsgd:sync_every=4", 250) for name in "abc")
    for each in (b, c):
        each.until("members")
    while len(a.until("step")["members"]) < 3:
        pass
    c.signal(signal.SIGSTOP)
    while len(a.until("step")["members"]) > 2:
        pass
    alone = a.until("step")["step"]
    c.signal(signal.SIGCONT)
    ends = [each.ended() for each in (a, b, c)]
    assert ends[0]["sums"] == ends[1]["sums"] == ends[2]["sums"]
    assert all(each["end"]["members"] == 3 for each in ends)
    assert max(said["step"] for said in c.said if "step" in said) == 250
    assert alone < 250


@pytest.mark.parametrize("algorithm", ["dense", "lowbit", "localsgd:sync_every=4"])
def test_members_may_end_some_steps_apart(members: Members, algorithm: str) -> None:
    a, b = members.member("a", algorithm, 100), members.member("b", algorithm, 101)
    first, last = (each.ended() for each in (a, b))
    assert last["end"]["steps"] == 101
    together = first["end"]["steps"] == 101  # it had not left yet, and was brought to the other's step
    assert (first["sums"] == last["sums"]) == together


def test_one_leaves_by_a_word_and_the_others_go_on(members: Members) -> None:
    a, b = (members.member(name, "lowbit:sync_every=2", 120) for name in "ab")
    b.until("members")
    while len(a.until("step")["members"]) < 2:
        pass
    c = members.member("c", "lowbit:sync_every=2", 120, how="leaves")
    left = c.ended()
    assert left["end"]["steps"] < 120
    ends = [each.ended() for each in (a, b)]
    assert ends[0]["sums"] == ends[1]["sums"] != left["sums"]


def test_preemption_is_a_leave_also_of_one_that_waits_in_a_round(members: Members) -> None:
    a, b, c = (members.member(name, "lowbit:sync_every=2", 160) for name in "abc")
    for each in (b, c):
        each.until("members")
    while len(a.until("step")["members"]) < 3:
        pass
    c.signal(signal.SIGTERM)
    assert c.process.wait(SECONDS) == -signal.SIGTERM
    while len(a.until("step")["members"]) > 2:
        pass
    a.signal(signal.SIGSTOP)
    time.sleep(0.3)  # b is in its next round
    b.signal(signal.SIGTERM)
    assert b.process.wait(SECONDS) == -signal.SIGTERM
    a.signal(signal.SIGCONT)
    assert a.ended()["end"]["members"] == 1
    assert all("is to end (SIGTERM), and leaves after step" in each.error() for each in (b, c))


def test_the_store_may_be_away_and_is_filled_again(members: Members) -> None:
    a, b = (members.member(name, "localsgd:sync_every=4", 250) for name in "ab")
    b.until("members")
    while len(a.until("step")["members"]) < 2:
        pass
    members.kill_store()
    away = a.until("step")["step"]
    c = members.member("c", "localsgd:sync_every=4", 250)
    a.until("step", away + 20)  # training needs no store
    members.serve()  # it is empty, and the one that waits for it leaves them time to write themselves in
    assert c.until("begun")["begun"] > away
    ends = [each.ended() for each in (a, b, c)]
    assert ends[0]["sums"] == ends[1]["sums"] == ends[2]["sums"]


@pytest.mark.parametrize("algorithm", ["localsgd:sync_every=2", "dense"])
def test_one_that_has_nan_ends_and_the_others_go_on(members: Members, algorithm: str) -> None:
    a, b = (members.member(name, algorithm, 150) for name in "ab")
    b.until("members")
    while len(a.until("step")["members"]) < 2:
        pass
    c = members.member("c", algorithm, 150, how="nan")
    c.until("members")
    assert c.process.wait(SECONDS) == 1
    error = c.error()
    assert "NonFinite" in error, error
    ends = [each.ended() for each in (a, b)]
    assert ends[0]["sums"] == ends[1]["sums"]
    assert ends[0]["last"] < ends[0]["first"]
    told = a.error()
    assert "NaN or infinity in" in told
    assert "on rank 2" in told
    assert "a, b, c" in told or "b, a, c" in told


# ---- what cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "how", "name", "says"),
    [
        (
            "localsgd:sync_every=4",
            "other model",
            "b",
            "this replica has another model than the training",
        ),
        ("localsgd:sync_every=8", "", "b", "this replica has another strategy than the training"),
        ("localsgd:sync_every=4", "", "a", "a member named 'a' is at work: give each replica another name"),
    ],
)
def test_who_does_not_fit_is_refused_and_the_others_go_on(
    members: Members, algorithm: str, how: str, name: str, says: str
) -> None:
    a = members.member("a", "localsgd:sync_every=4", 200)
    a.until("begun")
    other = members.member(name, algorithm, 200, how)
    assert other.process.wait(SECONDS) == 1
    assert says in other.error()
    assert a.ended()["end"]["period"] == 1


def test_too_few_for_too_long_is_an_error(members: Members) -> None:
    a = members.member("a", "localsgd:sync_every=4", 60, how="two")
    assert a.process.wait(SECONDS) == 1
    assert "waited 8 s for a period of training: there are 1 of the 2 members that min asks for" in a.error()


def test_no_store_is_an_error_that_says_what_to_start(members: Members) -> None:
    members.kill_store()
    a = members.member("a", "localsgd:sync_every=4", 60)
    assert a.process.wait(SECONDS) == 1
    assert "start it there, by python -m tacit.members.store --port" in a.error()


def test_a_quorum_does_not_wait_for_who_is_late_and_takes_its_steps_later(members: Members) -> None:
    a, b = (members.member(name, "localsgd:sync_every=4", 300, how="quorum") for name in "ab")
    b.until("members")
    c = members.member("c", "localsgd:sync_every=4", 300, how="slow")
    c.until("step", 40)
    while len(a.until("step")["members"]) > 2:
        pass
    while len(a.until("step")["members"]) < 3:
        pass
    ends = [each.ended() for each in (a, b, c)]
    assert ends[0]["sums"] == ends[1]["sums"] == ends[2]["sums"]
    assert "c is late: the others end their round without it" in a.error() + b.error()
    assert "gives no sign of life" not in a.error() + b.error()
