"""Replicas that join, leave and die, as processes: those that live go on, and end equal."""

import signal
from collections.abc import Iterator

import pytest
from members_processes import Members, started

KINDS = (
    "lowbit:sync_every=2",
    "lowbit:sync_every=2,late=1",
    "localsgd:sync_every=4",
    "diloco:sync_every=4",
    "streaming-diloco:sync_every=12,fragments=2",
    "slowmo:sync_every=4",
    "sparseloco:sync_every=4",
    "dense",
    "int8",
    "topk:ratio=0.1",
    "powersgd",
    "zeroone-adam:sync_every=4",
)


@pytest.fixture
def members() -> Iterator[Members]:
    with started() as all_:
        yield all_


@pytest.mark.parametrize("algorithm", KINDS)
def test_one_dies_and_another_comes(members: Members, algorithm: str) -> None:
    first = [members.member(name, algorithm, 150) for name in "ab"]
    lost = members.member("c", algorithm, 150)
    for each in (*first, lost):
        each.until("members")
    while len(first[0].until("step")["members"]) < 3:
        pass
    lost.until("step", 20)
    lost.signal(signal.SIGKILL)
    while len(first[0].until("step")["members"]) > 2:
        pass
    came = members.member("d", algorithm, 150)
    assert came.until("begun")["begun"] > 20
    ends = [each.ended() for each in (*first, came)]
    assert ends[0]["sums"] == ends[1]["sums"] == ends[2]["sums"]
    assert all(each["end"]["members"] == 3 for each in ends)
    assert ends[0]["last"] < ends[0]["first"]
