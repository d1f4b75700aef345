"""What threads are called."""

import os
import threading

from tacit_lab.profiling import threads


def test_threads_are_named_by_what_they_are_for() -> None:
    end = threading.Event()
    lanes = [threading.Thread(target=end.wait, name="tacit-lane") for _ in range(2)]
    for each in lanes:
        each.start()
    tids = [each.native_id for each in lanes]
    assert all(tid in threads.running() for tid in tids)
    names = threads.names([os.getpid(), *(tid for tid in tids if tid), 1 << 22], main=os.getpid())
    end.set()
    for each in lanes:
        each.join()
    assert [names[tid] for tid in tids if tid] == ["tacit: lane"] * 2
    numbered = threads.numbered(names)
    assert numbered[os.getpid()] == "main"
    assert [numbered[tid] for tid in sorted(tid for tid in tids if tid)] == ["tacit: lane 1", "tacit: lane 2"]
