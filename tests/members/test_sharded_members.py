"""Replicas of several ranks, among which FSDP2 shards them: one leaves whole when one of its ranks dies."""

import os
import signal

from members_processes import started


def test_a_rank_dies_and_its_replica_comes_back_whole() -> None:
    with started() as members:
        a, b = (members.sharded(name, "lowbit:sync_every=2", 300) for name in "ab")
        b.until("begun")
        while len(a.until("step")["members"]) < 2:
            pass
        lost = next(said for _ in range(9) if (said := b.until("step", 20))["rank"] == 1)
        os.kill(lost["pid"], signal.SIGKILL)
        while len(a.until("step")["members"]) > 1:
            pass
        assert b.until("begun")["begun"] > lost["step"]
        ends = {}
        for each in (a, b):
            for _ in range(2):
                end = each.until("end")
                ends[each, end["rank"]] = end
            assert each.process.wait(60) == 0, each.error()
        for rank in range(2):
            assert ends[a, rank]["sums"] == ends[b, rank]["sums"]
        assert all(end["end"]["members"] == 2 for end in ends.values())
        assert ends[a, 0]["last"] < ends[a, 0]["first"]
