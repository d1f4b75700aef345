"""Inside the nodes first, then between them: what is averaged on the near axis crosses the far one once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from tacit import checks
from tacit.contracts import (
    NET,
    NODE,
    Collect,
    Compressor,
    Context,
    Everything,
    Exchange,
    Outcome,
    Place,
    Request,
    Scatter,
    Spans,
    State,
    Topology,
)
from tacit.exchanges import on, reduced, say, watched
from tacit.topologies.flat import reduce_flat


@dataclass(frozen=True)
class Hierarchical(Topology):
    """By node: reduce-scatter inside, the compressor's exchange between the nodes, all-gather inside.

    Of n elements on M nodes of G ranks, a dense exchange moves 2 (M - 1) / M n across each node's link, where
    a ring over all ranks moves 2 (R - 1) / R n. Inside a node everything travels densely, and the compressor
    works on the node's mean. Survey (arXiv 2003.03009), hierarchical all-reduce.

    Attributes:
        by: "slices": each rank of a node takes 1 / G of the tensor across, so that G streams share the work.
            "leaders": the first rank of a node takes all of it, as eDNNcomm and DASO do with one rank a node.
    """

    by: Literal["slices", "leaders"] = "slices"

    meets = NET

    def __post_init__(self) -> None:
        checks.word("by", self.by, ("slices", "leaders"))

    def spans(self, edges: Sequence[int] | range, near: Place) -> Spans:
        """Slices as equal as the edges allow; for leaders, everything and nothing."""
        if self.by == "leaders":
            return ((0, edges[-1]), *[(edges[-1], edges[-1])] * (near.peers - 1))
        cuts = [_nearest(edges, edges[-1] * i / near.peers) for i in range(near.peers + 1)]
        return tuple(pairwise(cuts))

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Three conversations; the middle one is the compressor's."""
        if x is not ctx.out:
            ctx.out.copy_(x)
        if ctx.near.peers == 1:
            return (yield from _across(ctx.out, compressor, state, ctx, ctx.total))
        yield Scatter(ctx.out, ctx.spans, NODE, ctx.total)
        if ctx.word is not None:
            yield from say(ctx.word, NODE)
        start, stop = ctx.spans[ctx.near.rank]
        mine = ctx.out[start:stop]
        done = Outcome(mine, Everything(mine), state)
        if stop > start:
            here = replace(ctx, out=mine, share=ctx.share * mine.numel() / x.numel())
            done = yield from _across(mine, compressor, state, here, None)
        yield Collect(ctx.out, ctx.spans, NODE)
        yield from _pass_on(ctx.word, ctx.spans)
        return done._replace(mean=ctx.out)


def _across(x: Tensor, compressor: Compressor, state: State, ctx: Context, total: Tensor | None) -> Exchange:
    talk = reduced(compressor.exchange(x, state, ctx), reduce_flat)
    return on(NET, watched(talk, ctx.word, total))


def _pass_on(word: Tensor | None, spans: Spans) -> Generator[Request, Any, None]:
    """Ranks that took nothing across have the word of their own node only."""
    speaks = [stop > start for start, stop in spans]
    if word is None or all(speaks) or not any(speaks):
        return
    first = speaks.index(True)
    n = word.numel()
    yield Collect(word, tuple((0, n) if i == first else (n, n) for i in range(len(spans))), NODE)


def _nearest(edges: Sequence[int] | range, target: float) -> int:
    i = bisect_left(edges, target)
    return min(edges[max(i - 1, 0) : i + 1], key=lambda edge: abs(edge - target))
