"""Process groups of torch.distributed: those in which exchanges run, and small questions to all ranks."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import torch_compat
from tacit.torch_compat import ShutdownNotice
from tacit.transports.started_collectives import Later
from tacit.transports.thread_shutdown import settle

Use = tuple[int, str]
"""The channel and the axis that a group is for."""


class GroupUser(Protocol):
    """A transport whose groups are made here.

    Attributes:
        parent: the process group whose ranks are the replicas.
        under_way: its collectives that have not ended.
    """

    parent: dist.ProcessGroup
    under_way: Any

    def close(self) -> None:
        """Let go of its groups."""


_OWN: dict[tuple[object, ...], list[dist.ProcessGroup]] = {}
_OPEN: dict[GroupUser, int] = {}
"""The transports at work, and the channel of each: two at once must not share a process group."""
_RETIRED: dict[dist.ProcessGroup, Sequence[Later]] = {}
"""Groups of sessions that have failed, and what may hang there."""
_CONTROL: dict[tuple[int, ...], dist.ProcessGroup] = {}
_NOTICES: dict[tuple[int, ...], dist.ProcessGroup] = {}
_MADE: Counter[tuple[int, ...]] = Counter()
"""How many groups of these ranks were made: on all of them as many, whatever else one takes part in."""
_NOTICE, _SHARING = "tacit", "tacit-gloo"
"""The names of a backend that only tells of a shutdown, and of Gloo with one thread for all sockets."""
_LINGER = 2.0
_PROCESS: int | None = None
"""Which has made groups: one that it forks inherits them, and none of their threads."""


@contextmanager
def joined_world(timeout: timedelta) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """This process in the world that its launcher tells, by Gloo: its rank, and the group of all ranks."""
    dist.init_process_group("gloo", timeout=timeout)
    try:
        assert dist.group.WORLD is not None
        yield dist.get_rank(), dist.group.WORLD
    finally:
        dist.destroy_process_group()


# ---- who is there -------------------------------------------------------------------------------------


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number in the group; in the world where none is given."""
    return dist.get_rank(group)


def ranks_of(group: dist.ProcessGroup | None = None) -> list[int]:
    """The group's ranks, in its order, by their numbers in the world; all of these where none is given."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend's name as it was given, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return dist.get_backend(group)


def backend_on(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for tensors there, such as "nccl"; "" where it has none."""
    if device.type not in torch_compat.device_types(group):
        return ""
    return torch_compat.backend_name(group, device.type)


def gloo_is_built() -> bool:
    """Whether this build of torch has Gloo."""
    return dist.is_gloo_available()


# ---- what all say -------------------------------------------------------------------------------------


def control(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of the same ranks for tensors on the host: itself, or one by Gloo. A collective call.

    That one lives as long as torch.distributed.
    """
    if backend_on(group, torch.device("cpu")):
        return group
    ranks = ranks_of(group)
    kept = _CONTROL.get(tuple(ranks))
    if kept is None or not torch_compat.is_open(kept):
        kept = _CONTROL[tuple(ranks)] = _new_group(ranks, timeout, "gloo")
    return kept


def gathered(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """What every rank of the group gives, in their order. A collective call.

    Args:
        mine: a tensor on the host, of the same shape and type on all ranks.
        group: of any backend.
    """
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=control(group))
    return everyone


def collected(mine: object, group: dist.ProcessGroup) -> list[Any]:
    """What every rank of the group gives, in their order, on its first rank; [] on the others. Collective.

    Args:
        mine: anything that can be pickled.
        group: of any backend.
    """
    everyone = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, everyone, group=control(group), group_dst=0)
    return everyone or []


def said(mine: str, group: dist.ProcessGroup) -> list[str]:
    """The text that every rank of the group gives, in their order, on all of them. A collective call."""
    everyone = [""] * group.size()
    dist.all_gather_object(everyone, mine, group=control(group))
    return everyone


def sum_(x: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """Overwrite `x` with its sum over the group's ranks, where it lies; the future holds it."""
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


# ---- groups that live as long as torch.distributed ----------------------------------------------------


def notify_of_shutdown(ranks: Sequence[int], call: Callable[[], None]) -> None:
    """Have `call` called when torch.distributed is shut down. A collective call, of these ranks.

    `destroy_process_group` calls `shutdown` of every process group, while all still work. So these ranks get
    a group that carries nothing, once. The first call's function is the one that is called.
    """
    key = tuple(ranks)
    if torch_compat.is_open(_NOTICES.get(key)):
        return
    if _NOTICE not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            _NOTICE,
            lambda store, rank, size, timeout: ShutdownNotice(rank, size, _NOTICE, call),
            devices=["cpu"],
        )
    _NOTICES[key] = _new_group(ranks, None, _NOTICE)


def _new_group(ranks: Sequence[int], timeout: timedelta | None, backend: str) -> dist.ProcessGroup:
    global _PROCESS
    _PROCESS = os.getpid()
    if len(ranks) == dist.get_world_size():
        group = dist.new_group([*ranks], timeout, backend)
    else:
        _MADE[tuple(ranks)] += 1
        with torch_compat.group_named(f"tacit {' '.join(map(str, ranks))} #{_MADE[tuple(ranks)]}"):
            group = dist.new_group([*ranks], timeout, backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


# ---- groups in which exchanges run --------------------------------------------------------------------


def channel_of(user: GroupUser) -> int:
    """The transport's channel, which it keeps until it leaves.

    Equal on all ranks, as they open and close transports in the same order.
    """
    if user not in _OPEN:
        taken = {channel for other, channel in _OPEN.items() if other.parent is user.parent}
        _OPEN[user] = next(channel for channel in itertools.count() if channel not in taken)
    return _OPEN[user]


def leave(user: GroupUser) -> None:
    """Give its channel to the next transport."""
    _OPEN.pop(user, None)


def own_groups(
    parent: dist.ProcessGroup,
    places: Sequence[int],
    timeout: timedelta,
    backend: str,
    use: Use,
    count: int,
) -> list[dist.ProcessGroup]:
    """Process groups of some of the parent's ranks that nobody else uses, one session after another.

    Each axis of a channel has its own, also where two have the same ranks, as the world and the only node:
    both may speak at once, on one rank in another order than on the next.

    They live until torch.distributed is shut down: a group that is made where another was destroyed would
    find the addresses of its dead in the store.
    """
    all_ranks = ranks_of(parent)
    ranks = [all_ranks[place] for place in places]
    kept = _OWN.setdefault((tuple(all_ranks), tuple(ranks), timeout, backend, use), [])
    if not all(map(torch_compat.is_open, kept)):
        kept.clear()
    while len(kept) < count:
        kept.append(_new_group(ranks, timeout, _sharing_sockets(backend)))
    return kept[:count]


def _sharing_sockets(backend: str) -> str:
    """The backend by which a group has no thread of its own that waits for sockets, where there is one."""
    if backend != "gloo" or not torch_compat.shares_sockets():
        return backend
    if _SHARING not in dist.Backend.backend_list:
        make = torch_compat.gloo_sharing_sockets
        dist.Backend.register_backend(_SHARING, make, devices=["cpu"])
    return _SHARING


def abort(groups: Collection[dist.ProcessGroup]) -> None:
    """End every collective of these groups with an error; nobody is given them again."""
    for kept in [*_OWN.values()]:
        if any(group in groups for group in kept):
            kept.clear()
    for group in groups:
        torch_compat.abort(group)


def retire(groups: Mapping[dist.ProcessGroup, Sequence[Later]]) -> None:
    """Destroy groups that were aborted, each as soon as nothing of this rank's hangs there.

    A group that is destroyed closes its connections, and so ends what peers have hanging there: Gloo itself
    would wait for its time-out. They destroy theirs then, so that in the end nothing hangs anywhere.

    Args:
        groups: with all that was posted there and has not been answered.
    """
    _RETIRED.update(groups)
    _destroy_retired()


def _destroy_retired() -> bool:
    """Whether all are destroyed."""
    for group in [group for group, posted in _RETIRED.items() if not any(later.hangs() for later in posted)]:
        del _RETIRED[group]
        if torch_compat.is_open(group):
            dist.destroy_process_group(group)
    return not _RETIRED


@atexit.register
def _release() -> None:
    """Let the threads of our groups end while the interpreter lives.

    A thread of Gloo that returns from its last callback into an interpreter that is gone aborts the process.
    Groups that are still at work are left alone: to wait for them could take until their time-out. What hangs
    where a session has failed ends when its peers close, or end: for that we wait `_LINGER` seconds at most.
    """
    if os.getpid() != _PROCESS:
        return
    end = time.monotonic() + _LINGER
    while not _destroy_retired() and time.monotonic() < end:
        time.sleep(0.005)
    if not _OWN or any(user.under_way for user in _OPEN):
        return
    for user in [*_OPEN]:
        user.close()
    for kept in _OWN.values():
        while kept:
            group = kept.pop()
            if torch_compat.is_open(group):
                dist.destroy_process_group(group)
    settle()
