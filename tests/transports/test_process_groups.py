"""Groups of our own have no thread for sockets of their own: each would wake a hundred times a second."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tacit.errors import ConfigError
from tacit.transports.member_links import meeting_by
from tacit.transports.process_groups import (
    disband,
    gather_texts,
    joined_world,
    member_group,
    own_groups,
)


def _socket_threads() -> set[str]:
    tasks = {each: Path("/proc/self/task", each, "comm") for each in os.listdir("/proc/self/task")}
    return {
        each for each, task in tasks.items() if task.exists() and task.read_text().strip() == "gloo_tcp_loop"
    }


def test_an_interface_that_is_not_there_is_named_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    refused = pytest.raises(ConfigError, match=r"names 'eth7', and there is no such .*: write one of .*lo")
    with refused, joined_world(timedelta(seconds=9)):
        pass
    assert not dist.is_initialized()


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


def test_nothing_holds_a_group_of_members_that_is_over() -> None:
    """It has threads and connections of its own, and there is one for each period."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = member_group(
            meeting_by(None, "over", timedelta(seconds=60), bool), 0, 1, timedelta(seconds=60)
        )
        own_groups(group, [0], timedelta(seconds=9), "gloo", (0, "world"), 1)
        left = weakref.ref(group)
        disband(group)
        del group
        gc.collect()
        assert left() is None
    finally:
        dist.destroy_process_group()


def test_members_do_not_wait_in_gloo_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    is_gone, over = threading.Event(), threading.Event()
    meeting = meeting_by(None, "test", timedelta(seconds=60), is_gone.is_set)
    group = member_group(meeting, 0, 1, timedelta(seconds=60))
    try:
        assert gather_texts("here", group) == ["here"]
        monkeypatch.setattr(dist, "all_gather_object", lambda *_, **__: over.wait())
        is_gone.set()
        with pytest.raises(RuntimeError, match="a member is gone"):
            gather_texts("here", group)
    finally:
        over.set()
        disband(group)
        dist.destroy_process_group()
