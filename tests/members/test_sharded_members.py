"""Replicas of several ranks, among which FSDP2 shards them: one leaves whole when one of its ranks dies."""

import os
import signal

from members_processes import started


def test_a_rank_dies_and_its_replica_comes_back_whole() -> None:
    """Beside another one, and one of a process: this takes the first one's state, and gives its own later."""
    with started() as members:
        b = members.sharded("b", "lowbit:sync_every=2", 300)
        b.until("begun")
        a = members.sharded("a", "lowbit:sync_every=2", 300, whole=True)
        a.until("begun")
        c = members.sharded("c", "lowbit:sync_every=2", 300)
        while a.until("step")["members"] != ["b", "a", "c"]:
            pass
        lost = next(said for _ in range(9) if (said := b.until("step", 20))["rank"] == 1)
        os.kill(lost["pid"], signal.SIGKILL)
        while a.until("step")["members"] != ["a", "c"]:
            pass
        assert b.until("begun")["begun"] > lost["step"]
        ends = {}
        for each in (a, b, c):
            for _ in range(2):
                end = each.until("end")
                ends[each, end["rank"]] = end
            assert each.process.wait(60) == 0, each.error()
        for rank in range(2):
            assert ends[a, rank]["sums"] == ends[b, rank]["sums"] == ends[c, rank]["sums"]
        assert all(end["end"]["members"] == 3 for end in ends.values())
        assert ends[a, 0]["last"] < ends[a, 0]["first"]
