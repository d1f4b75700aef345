"""An all-to-all by Gloo in rounds, in which each rank sends to one peer and receives from another.

Gloo's own posts what a rank sends before what it receives. The word that it is ready for a peer's message
then waits behind the bytes for that peer, so that two ranks send to each other one after the other: on links
of 100 Mbit/s it takes 1.4 times as long as the bytes need (`dev/log`, 2026-11-26). Here all receives are
posted first. Gloo calls nobody when a message is through, so a thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Pairwise", "Sizes", "begun"]

Sizes: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""How many entries come from each rank of a group, and how many are for each."""

TAGS = 1 << 16
"""Messages of exchanges are told apart by tags from here on; below are those of permutations."""


@dataclass(frozen=True, eq=False)
class Pairwise:
    """Messages whose receives are posted, and whose sends are made by whoever waits."""

    leaving: Sequence[Tensor]
    receives: Sequence[dist.Work]
    rank: int
    group: dist.ProcessGroup
    tag: int

    def wait(self) -> None:
        """Send to the next rank, to the one after that, and so on; return when all has come and gone.

        The bytes for one peer are handed to the kernel before those for the next: links carry one message at
        a time, and no rank receives from all others at once.
        """
        peers = len(self.leaving)
        for step in range(1, peers):
            to = (self.rank + step) % peers
            if self.leaving[to].numel():
                work = dist.isend(self.leaving[to], group=self.group, tag=self.tag, group_dst=to)
                if work is not None:
                    work.wait()
        for work in self.receives:
            work.wait()


def begun(
    arrives: Tensor,
    leaves: Tensor,
    sizes: Sizes,
    group: dist.ProcessGroup,
    number: int,
) -> Pairwise:
    """Post all receives, and copy what stays here.

    Args:
        arrives: flat, from all ranks of the group, in their order; `leaves`: for all, not changed until all
            is done.
        number: of the exchange on this group; the same on all ranks.
    """
    arriving, leaving = torch.split(arrives, [*sizes[0]]), torch.split(leaves, [*sizes[1]])
    peers, rank, tag = len(leaving), group.rank(), TAGS + number % TAGS
    arriving[rank].copy_(leaving[rank])
    receives = [
        dist.irecv(arriving[source], group=group, tag=tag, group_src=source)
        for source in ((rank - step) % peers for step in range(1, peers))
        if arriving[source].numel()
    ]
    return Pairwise(leaving, [work for work in receives if work is not None], rank, group, tag)
