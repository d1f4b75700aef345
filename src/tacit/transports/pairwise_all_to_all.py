"""Messages of each rank to every other, in rounds in which it sends to one peer and receives from another.

Gloo's all-to-all posts what a rank sends before what it receives. The notice that it is ready for a peer's
message then waits behind the bytes for that peer, so that two ranks send to each other one after the other:
on links of 100 Mbit/s it takes 1.4 times as long as the bytes need (`dev/log`, 2026-11-26). Gloo's all-gather
passes each payload from rank to rank, and each hop is a round trip, as only a receiver that is ready is sent
to. Here all receives are posted first. Gloo has no callback for a complete message, so a thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

Sizes: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""The number of entries from each rank of a group, and for each."""

TAGS = 1 << 16
"""The first tag of these exchanges; lower ones are those of permutations."""


@dataclass(frozen=True, eq=False)
class Pairwise:
    """Messages whose receives are posted; the thread that waits makes the sends."""

    leaving: Sequence[Tensor]
    receives: Sequence[dist.Work]
    rank: int
    group: dist.ProcessGroup
    tag: int

    def wait(self) -> None:
        """Send to the next rank, to the one after that, and so on; return when all is sent and received.

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
    arriving: Sequence[Tensor], leaving: Sequence[Tensor], group: dist.ProcessGroup, number: int
) -> Pairwise:
    """Post all receives, and copy what stays here.

    Args:
        arriving: flat; receives from each rank of the group, in their order.
        leaving: flat; for each rank, not changed until all is done.
        number: the number of the exchange on this group; the same on all ranks.
    """
    peers, rank, tag = len(leaving), group.rank(), TAGS + number % TAGS
    arriving[rank].copy_(leaving[rank])
    receives = [
        dist.irecv(arriving[source], group=group, tag=tag, group_src=source)
        for source in ((rank - step) % peers for step in range(1, peers))
        if arriving[source].numel()
    ]
    return Pairwise(leaving, [work for work in receives if work is not None], rank, group, tag)
