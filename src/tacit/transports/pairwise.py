"""An all-to-all by Gloo in rounds, in which each rank sends to one peer and receives from another.

Gloo's own posts what a rank sends before what it receives. The word that it is ready for a peer's message
waits behind the bytes for that peer then, so that messages of two ranks to each other follow each other: on
links of 100 Mbit/s it takes 1.4 times as long as the bytes do (`dev/LOG.md`, 2026-11-26). Here all receives
are posted first. Gloo calls nobody when a message is through, so a thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

__all__ = ["Rounds", "begun"]

TAGS = 1 << 16
"""Messages of exchanges are told apart by tags from here on; below are those of permutations."""


@dataclass(frozen=True, eq=False)
class Rounds:
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
    leaving: Sequence[Tensor], arriving: Sequence[Tensor], rank: int, group: dist.ProcessGroup, number: int
) -> Rounds:
    """Post all receives, and copy what stays here.

    Args:
        leaving: flat, for each rank of the group; not changed until all is done.
        arriving: of each, as long as what it sends here.
        number: of the exchange on this group; the same on all ranks.
    """
    peers, tag = len(leaving), TAGS + number % TAGS
    arriving[rank].copy_(leaving[rank])
    receives = [
        dist.irecv(arriving[source], group=group, tag=tag, group_src=source)
        for source in ((rank - step) % peers for step in range(1, peers))
        if arriving[source].numel()
    ]
    return Rounds(leaving, [work for work in receives if work is not None], rank, group, tag)
