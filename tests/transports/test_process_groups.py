"""Groups of our own have no thread for sockets of their own: each would wake a hundred times a second."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tacit.transports.process_groups import own_groups


def _socket_threads() -> set[str]:
    tasks = {each: Path("/proc/self/task", each, "comm") for each in os.listdir("/proc/self/task")}
    return {
        each for each, task in tasks.items() if task.exists() and task.read_text().strip() == "gloo_tcp_loop"
    }


def test_all_groups_share_the_thread_that_waits_for_sockets() -> None:
    others = _socket_threads()  # a group of another test may not have ended yet
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        groups = own_groups(world, [0], timedelta(seconds=9), "gloo", (0, "world"), 4)
        until = time.monotonic() + 30
        while not _socket_threads() - others and time.monotonic() < until:
            time.sleep(0.01)  # a thread gives itself its name
        time.sleep(0.2)
        assert len(_socket_threads() - others) == 1
        for i, group in enumerate(groups):
            x = torch.full((3,), float(i))
            dist.all_reduce(x, group=group)
            assert x.tolist() == [i] * 3
    finally:
        dist.destroy_process_group()
