"""What the ranks tell each other that share a replica, where replicas come and go."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tacit.errors import TacitError
from tacit.transports.process_groups import own_groups, rank_in

T = TypeVar("T")


class ReplicaRanks:
    """The ranks of this process's world, which share one replica and decide together.

    Each call is a collective one of them; one rank alone sends nothing.

    Args:
        size: how many ranks share the replica: the whole world, or this one alone.
        timeout: how long one may wait for another.
        held: how many shards of the replica this process has; all of them, if more than one.

    Attributes:
        rank: the number of this rank among them.
        own: the numbers of the shards that this process has.
    """

    def __init__(self, size: int, timeout: timedelta, held: int = 1) -> None:
        self.rank = 0
        self._group: dist.ProcessGroup | None = None
        if size > held:
            assert dist.group.WORLD is not None
            self.rank = rank_in()
            use = (0, "replica")
            [self._group] = own_groups(dist.group.WORLD, range(size), timeout, "gloo", use, 1)
        self.own = range(self.rank, self.rank + held)

    def any(self, *mine: bool) -> list[bool]:
        """Of each flag whether a rank has set it."""
        if self._group is None:
            return [*mine]
        flags = torch.tensor(mine, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        return [bool(each) for each in flags.tolist()]

    def gathered(self, mine: T) -> list[T]:
        """What each rank has, in their order."""
        if self._group is None:
            return [mine]
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def first(self, call: Callable[[], T]) -> T:
        """What the call returns, which the first rank makes for all; an error of tacit's is raised on all."""
        if self._group is None:
            return call()
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = call()
            except TacitError as error:
                found[1] = error
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        if found[1] is not None:
            raise found[1]
        answer: T = found[0]
        return answer
