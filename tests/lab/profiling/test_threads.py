"""What the kernel counts of threads, and what they are called."""

import mmap
import os
import threading
import time
from pathlib import Path

import pytest

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


def test_the_counts_of_a_thread_only_rise(tmp_path: Path) -> None:
    before = threads.counts(threading.get_native_id())
    with mmap.mmap(-1, 8 << 20) as memory:  # fresh pages; an allocator may hand out those of before
        memory[:: 1 << 12] = b"x" * (8 << 8)
    time.sleep(0.001)
    more = threads.counts(threading.get_native_id()) - before
    assert more.minor > 0
    assert more.voluntary > 0
    assert min(more.major, more.involuntary, more.ready_ns) >= 0
    with pytest.raises(OSError, match="No such file"):
        threads.counts(1 << 22)
