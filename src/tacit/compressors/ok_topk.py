"""The largest entries of the sum, by a split of the entries among the ranks (Ok-Topk: Li & Hoefler 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.contracts import (
    AllGather,
    AllReduce,
    AllToAll,
    Compressor,
    Context,
    Exchange,
    Outcome,
    Sparse,
    State,
)
from tacit.exchange.finite_checks import refuse_overflow
from tacit.kernels.select import select_largest


@dataclass(frozen=True)
class OkTopK(Compressor):
    """Send the k = ceil(ratio x n) largest to the ranks that add up their region; get the k largest sums.

    The paper's O(k) all-reduce (arXiv 2201.07598): each rank proposes bounds that cut its own entries into P
    equal parts, and the mean of the bounds is taken; rank j adds up what lies in region j; the largest sums
    of all regions come to all. What is not among the k largest sums stays in the residual of each rank, so
    put `ErrorFeedback` around it.

    Bytes: 2 (P - 1) / P x 4 x (P - 1) for the bounds, and (P - 1) x 8 x c twice, c = ceil(slack x k / P): at
    slack 1.25 about 5 k (P - 1) / P numbers, where the paper has less than 6 k (P - 1) / P, and an
    all-gather 2 k (P - 1).

    Differences from the paper: a message has a fixed size, so what does not fit into `slack` waits, where it
    sends what there is and then balances; thresholds and bounds are found anew in each round, exactly, where
    it keeps them for 32 and 64; positions take four bytes, as in its code.

    Attributes:
        ratio: the share of the entries that is sent, and that arrives, in (0, 1].
        slack: room in each message, as a multiple of an equal share, 1 or more.
    """

    ratio: float = 0.01
    slack: float = 1.25

    def __post_init__(self) -> None:
        ratio.check(self.ratio)
        checks.real("slack", self.slack, "write 1.25", least=1.0)

    def init(self, like: Tensor) -> State:
        """No state; wrap it in `ErrorFeedback` to have a residual."""
        return {}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Bounds, then entries to their regions, then the largest sums to all."""
        numel, peers = x.numel(), ctx.peers
        k = ratio.count(self.ratio, numel)
        room = min(numel, math.ceil(self.slack * k / peers))
        found = select_largest(x, k)
        refuse_overflow(found.values, ctx)
        index, values = found.positions.long(), found.values
        cuts = torch.arange(1, peers, device=x.device) * k // peers
        bounds = x.new_empty(peers - 1, dtype=torch.float32)
        if not x.is_meta:
            bounds.copy_(index[cuts])
        yield AllReduce((bounds,))
        regions = [_packed(index, values, numel, room)] * peers
        if not x.is_meta:
            # Equal on all ranks, and rising: regions are cut at whole entries.
            bounds = bounds.round().long().clamp(0, numel)
            region = torch.bucketize(index, bounds, right=True)
            mine = (region == each for each in range(peers))
            regions = [_packed(index[here], values[here], numel, room) for here in mine]
        theirs = yield AllToAll(tuple(regions))
        ctx.out.zero_()
        for at, value in () if x.is_meta else theirs:
            real = at < numel
            ctx.out.index_add_(0, at[real].long(), value[real])
        ctx.out.div_(peers)
        refuse_overflow(ctx.out, ctx)
        largest = select_largest(ctx.out, room)
        payload = _packed(largest.positions.long(), largest.values, numel, room)
        gathered = yield AllGather(payload)
        if x.is_meta:
            return Outcome(ctx.out, Sparse(index, values), state)
        at, value = (torch.cat(parts) for parts in zip(*gathered, strict=True))
        at, value = at[value != 0].long(), value[value != 0]
        kept = value.abs().topk(min(k, len(value))).indices
        ctx.out.zero_().index_copy_(0, at[kept], value[kept])
        # What this rank has sent, and is among them.
        places, sizes = (torch.cat(parts) for parts in zip(*regions, strict=True))
        arrived = torch.isin(places, at[kept])
        return Outcome(ctx.out, Sparse(places[arrived].long(), sizes[arrived]), state)


def _packed(index: Tensor, values: Tensor, numel: int, room: int) -> tuple[Tensor, Tensor]:
    """Positions (int32) and values of the `room` largest entries; `numel` stands where there are fewer."""
    at = index.new_full((room,), numel, dtype=torch.int32)
    size = values.new_zeros(room)
    if not index.is_meta:
        if len(index) > room:
            chosen = values.abs().topk(room).indices.sort().values
            index, values = index[chosen], values[chosen]
        at[: len(index)], size[: len(index)] = index.int(), values
    return at, size
