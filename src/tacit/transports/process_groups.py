"""Process groups of torch.distributed: those of exchanges, and small gathers over all ranks."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import torch_compat
from tacit.environment import CONNECTIONS
from tacit.errors import ConfigError
from tacit.torch_compat import ShutdownNotice
from tacit.transports.started_collectives import Later
from tacit.transports.thread_shutdown import settle

# torch 2.13 renamed it, and warns about the old name.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

if TYPE_CHECKING:
    from tacit.transports.member_links import Meeting

Use = tuple[int, str]
"""(channel, axis): the use of a group."""


class GroupUser(Protocol):
    """A transport that uses groups of this module.

    Attributes:
        parent: the process group whose ranks are the replicas.
        under_way: its collectives that have not ended.
    """

    parent: dist.ProcessGroup
    under_way: Any

    def close(self) -> None:
        """Release its groups."""


_OWN: dict[tuple[object, ...], list[dist.ProcessGroup]] = {}
_OPEN: dict[GroupUser, int] = {}
"""The open transports, and the channel of each: no two share a process group."""
_RETIRED: dict[dist.ProcessGroup, Sequence[Later]] = {}
"""Aborted groups of failed sessions, and their collectives that may hang."""
_OF_MEMBERS: dict[dist.ProcessGroup, Meeting] = {}
"""Groups whose ranks are members, and where these meet."""
_READY: dict[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = {}
"""Of each of those, groups of the same ranks that nobody uses yet, by name."""
_AHEAD = 3
"""How many of these are made."""
_CONTROL: dict[tuple[int, ...], dist.ProcessGroup] = {}
_NOTICES: dict[tuple[int, ...], dist.ProcessGroup] = {}
_MADE: Counter[tuple[object, ...]] = Counter()
"""The number of groups made for these ranks; equal on all of them, whatever else a rank takes part in."""
_NOTICE, _SHARING = "tacit", "tacit-gloo"
"""The names of two backends: one that only reports a shutdown, and Gloo with one thread for all sockets."""
_MOST_CONNECTIONS = 64
"""Each has two threads in each group."""
_LINGER = 2.0
_PROCESS: int | None = None
"""The process that has made groups: a forked one inherits them without their threads."""


@contextmanager
def joined_world(timeout: timedelta) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """Join the launcher's world by Gloo: this process's rank, and the group of all ranks.

    Raises:
        ConfigError: Gloo is to use an interface that is not there.
    """
    from tacit.transports.network_interfaces import sent_bytes

    there = [*sent_bytes()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if there and name not in there:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, and there is no such network interface here: write one "
                f"of {', '.join(there)}"
            )
    dist.init_process_group("gloo", timeout=timeout)
    try:
        assert dist.group.WORLD is not None
        yield dist.get_rank(), dist.group.WORLD
    finally:
        dist.destroy_process_group()


# ---- ranks and backends
# -------------------------------------------------------------------------------------


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number in the group; by default in the world."""
    return dist.get_rank(group)


def ranks_of(group: dist.ProcessGroup | None = None) -> list[int]:
    """The group's ranks, in its order, by their numbers in the world; by default all."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend's name, as passed to torch, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return dist.get_backend(group)


def backend_on(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for tensors on a device, such as "nccl"; "" if it has none."""
    if device.type not in torch_compat.device_types(group):
        return ""
    return torch_compat.backend_name(group, device.type)


def gloo_is_built() -> bool:
    """Whether this build of torch has Gloo."""
    return dist.is_gloo_available()


# ---- gathers -------------------------------------------------------------------------------------


def control(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of the same ranks for tensors on the host: itself, or one by Gloo. A collective call.

    A new group lives as long as torch.distributed.
    """
    return group if backend_on(group, torch.device("cpu")) else _by_gloo(ranks_of(group), timeout)


def alone() -> dist.ProcessGroup:
    """A group of this rank and no other. It lives as long as torch.distributed."""
    return _by_gloo([rank_in()], None)


def _by_gloo(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    kept = _CONTROL.get(tuple(ranks))
    if kept is None or not torch_compat.is_open(kept):
        kept = _CONTROL[tuple(ranks)] = _new_group(ranks, timeout, "gloo")
    return kept


def gathered(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather a tensor of every rank of the group, in their order. A collective call.

    Args:
        mine: a tensor on the host, of the same shape and type on all ranks.
        group: of any backend.
    """
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    _waited(group, lambda: dist.all_gather(everyone, mine, group=control(group)))
    return everyone


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Everyone's flat tensor, in rows by rank; they are there when this stream goes on."""
    rows = mine.new_empty((group.size(), mine.numel()))
    all_gather_flat(rows.view(-1), mine, group=group)
    return rows


def swap_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What every rank has in its row of this rank's number, in rows by rank."""
    arriving = torch.empty_like(rows)
    dist.all_to_all_single(arriving.view(-1), rows.view(-1), group=group)
    return arriving


def gather_objects(mine: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather an object of every rank, in their order, on the first rank; [] on the others. Collective.

    Args:
        mine: anything that can be pickled.
        group: of any backend; by default of all ranks.
    """
    group = group or dist.group.WORLD
    assert group is not None
    everyone = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, everyone, group=control(group), group_dst=0)
    return everyone or []


def gather_texts(mine: str, group: dist.ProcessGroup) -> list[str]:
    """Gather a text of every rank of the group, in their order, on all ranks. A collective call."""
    everyone = [""] * group.size()
    _waited(group, lambda: dist.all_gather_object(everyone, mine, group=control(group)))
    return everyone


def _waited(group: dist.ProcessGroup, call: Callable[[], object]) -> None:
    """Wait for a collective; members do so in a thread, which Gloo keeps where one of them is gone."""
    meeting = _OF_MEMBERS.get(group)
    if meeting is None:
        call()
        return
    from tacit.transports.member_links import in_thread

    in_thread(call, meeting.is_off)


def sum_(x: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """Overwrite `x` with its sum over the group's ranks; the future holds `x`."""
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


# ---- groups that live as long as torch.distributed ----------------------------------------------------


def notify_of_shutdown(ranks: Sequence[int], call: Callable[[], None]) -> None:
    """Call `call` when torch.distributed is shut down. A collective call of these ranks.

    `destroy_process_group` calls `shutdown` of every process group, while all still work. So these ranks get
    one group that carries nothing. Only the first function passed here is called.
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


# ---- groups of members ---------------------------------------------------------------------------------


def member_group(meeting: Meeting, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group of processes that have a world of their own each. A collective call of them.

    Args:
        meeting: where they meet; used once.
        rank: this process's, of `size`.
        timeout: after which a collective fails.

    Raises:
        RuntimeError: one of them did not come.
    """
    # Those that the session will make are made beside it: each takes several round trips.
    first = range(1, _AHEAD + 1) if size > 1 and not meeting.relayed else ()
    ahead = [_name(meeting, range(size), number) for number in first]
    sharing = _sharing_sockets("gloo", connections())
    try:
        group, *others = _met(meeting, rank, size, {meeting.name: "gloo"} | dict.fromkeys(ahead, sharing))
    except BaseException:
        meeting.close()
        raise
    torch_compat.set_timeout(group, timeout)
    _OF_MEMBERS[group] = meeting
    _READY[group] = dict(zip(ahead, others, strict=True))
    return group


def _name(meeting: Meeting, places: Sequence[int], number: int) -> str:
    return f"{meeting.name} {' '.join(map(str, places))} #{number}"


def _met(meeting: Meeting, rank: int, size: int, named: Mapping[str, str]) -> list[dist.ProcessGroup]:
    """Groups, by name with their backends; Gloo would wait for ever for one that dies while they connect."""
    global _PROCESS
    _PROCESS = os.getpid()
    from tacit.transports.member_links import in_thread

    until = time.monotonic() + meeting.limit.total_seconds()
    return in_thread(
        lambda: meeting.make(rank, size, named), lambda: meeting.is_off() or time.monotonic() > until
    )


def disband(parent: dist.ProcessGroup) -> None:
    """Destroy a group of members, and those made of its ranks."""
    own = [group for key in [*_OWN] if key[0] is parent for group in _OWN.pop(key)]
    own += _READY.pop(parent).values()
    retire({group: () for group in (*own, parent) if group not in _RETIRED})
    for key in [key for key in _MADE if key[0] is parent]:
        del _MADE[key]  # which would hold the group, and with it its connections and threads
    _OF_MEMBERS.pop(parent).close()


def groups_of(parent: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """All groups of the same members, in the order in which they were made; of a hub the one."""
    own = [each for key, groups in _OWN.items() if key[0] is parent for each in groups]
    own += _READY[parent].values()
    made = {each.group_name: each for each in own if each.size() == parent.size()}
    return [parent] if is_relayed(parent) else [parent, *(made[name] for name in sorted(made))]


def are_members(group: dist.ProcessGroup) -> bool:
    """Whether its ranks are members, each of a world of its own."""
    return group in _OF_MEMBERS


def is_relayed(group: dist.ProcessGroup) -> bool:
    """Whether the group is one of members, and what they send goes by a hub."""
    return are_members(group) and _OF_MEMBERS[group].relayed


# ---- groups in which exchanges run --------------------------------------------------------------------


def channel_of(user: GroupUser) -> int:
    """The transport's channel, until `leave`.

    Equal on all ranks, as they open and close transports in the same order.
    """
    if user not in _OPEN:
        taken = {channel for other, channel in _OPEN.items() if other.parent is user.parent}
        _OPEN[user] = next(channel for channel in itertools.count() if channel not in taken)
    return _OPEN[user]


def leave(user: GroupUser) -> None:
    """Free the transport's channel for the next one."""
    _OPEN.pop(user, None)


def own_groups(
    parent: dist.ProcessGroup,
    places: Sequence[int],
    timeout: timedelta,
    backend: str,
    use: Use,
    count: int,
    connections: int = 1,
) -> list[dist.ProcessGroup]:
    """Process groups of some of the parent's ranks that nobody else uses, one session after another.

    Each axis of a channel has separate groups, also if two have the same ranks, such as the world and the
    only node: collectives of both may be under way, posted in another order on each rank.

    They live until torch.distributed is shut down: a group made after another was destroyed would find the
    old addresses in the store.

    Raises:
        ConfigError: there cannot be several connections.
    """
    all_ranks = ranks_of(parent)
    ranks = [all_ranks[place] for place in places]
    among: object = parent if parent in _OF_MEMBERS else tuple(all_ranks)
    kept = _OWN.setdefault((among, tuple(ranks), timeout, backend, use, connections), [])
    if not all(map(torch_compat.is_open, kept)):
        kept.clear()
    while len(kept) < count:
        if parent in _OF_MEMBERS:
            kept.append(_of_members(parent, ranks, timeout, connections))
        else:
            kept.append(_new_group(ranks, timeout, _sharing_sockets(backend, connections)))
    return kept[:count]


def _of_members(
    parent: dist.ProcessGroup, ranks: Sequence[int], timeout: timedelta, connections: int
) -> dist.ProcessGroup:
    """A group of some of the parent's ranks. A collective call of these."""
    meeting = _OF_MEMBERS[parent]
    _MADE[parent, *ranks] += 1
    name = _name(meeting, ranks, _MADE[parent, *ranks])
    group = _READY[parent].pop(name, None)
    if group is None:
        [group] = _met(
            meeting, ranks.index(parent.rank()), len(ranks), {name: _sharing_sockets("gloo", connections)}
        )
    torch_compat.set_timeout(group, timeout)
    return group


def connections() -> int:
    """How many connections two ranks are to have for an exchange.

    Raises:
        ConfigError: the user has written no such number.
    """
    text = os.environ.get(CONNECTIONS, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= _MOST_CONNECTIONS):
        raise ConfigError(
            f"environment variable {CONNECTIONS}={text!r}: write how many connections two ranks have, 1 to "
            f"{_MOST_CONNECTIONS}, such as 4"
        )
    return int(text)


def _sharing_sockets(backend: str, connections: int) -> str:
    """The backend whose groups share a thread for sockets, if there is one."""
    if backend != "gloo" or not torch_compat.shares_sockets():
        if connections > 1:
            raise ConfigError(
                f"{CONNECTIONS}={connections} is of Gloo, and here {backend!r} exchanges in a world of "
                f"{dist.get_backend()!r}: start that by init_process_group('gloo'), or unset {CONNECTIONS}"
            )
        return backend
    name = f"{_SHARING}-{connections}"
    if name not in dist.Backend.backend_list:
        make = partial(torch_compat.gloo_sharing_sockets, connections=connections)
        dist.Backend.register_backend(name, make, devices=["cpu"])
    return name


def abort(groups: Collection[dist.ProcessGroup]) -> None:
    """End every collective of these groups with an error; they are not used again."""
    for kept in [*_OWN.values()]:
        if any(group in groups for group in kept):
            kept.clear()
    for group in groups:
        torch_compat.abort(group)


def retire(groups: Mapping[dist.ProcessGroup, Sequence[Later]]) -> None:
    """Destroy aborted groups, each as soon as no collective of this rank hangs in it.

    A destroyed group closes its connections, which ends the hanging collectives of its peers: Gloo itself
    would wait for its time-out. Then the peers destroy theirs, until nothing hangs on any rank.

    Args:
        groups: each with its collectives that were posted and not answered.
    """
    _RETIRED.update(groups)
    _destroy_retired()


def _destroy_retired() -> bool:
    """Destroy retired groups without hanging collectives. Returns whether all are destroyed."""
    for group in [group for group, posted in _RETIRED.items() if not any(later.hangs() for later in posted)]:
        del _RETIRED[group]
        if torch_compat.is_open(group):
            dist.destroy_process_group(group)
    return not _RETIRED


@atexit.register
def _release() -> None:
    """End the threads of tacit's groups before the interpreter exits.

    A thread of Gloo that returns from its last callback into an interpreter that is gone aborts the process.
    Groups in use are left alone: waiting for them could take until their time-out. Hanging collectives of
    failed sessions end when the peers close or exit; this waits at most `_LINGER` seconds for that.
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
