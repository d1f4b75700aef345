"""Inside nodes or places first, then between them: the mean of each crosses the slower network once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    NET,
    NODE,
    WORLD,
    AllGatherInto,
    AxisRank,
    ByLinks,
    Compressor,
    Context,
    Exact,
    Exchange,
    Flags,
    LinkRates,
    NodeTopology,
    Options,
    Outcome,
    ReduceScatter,
    Request,
    Spans,
    State,
    cut_factors,
)
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import divide_
from tacit.exchange.joined_requests import average_, conducted
from tacit.topologies import schedules
from tacit.topologies.auto import Auto
from tacit.topologies.on_axis import OnAxis
from tacit.topologies.shapes import check_numbers, followed


@dataclass(frozen=True)
class Hierarchical(NodeTopology, ByLinks):
    """By node: reduce-scatter inside, the compressor's exchange between the nodes, all-gather inside.

    Of n elements on M nodes of G ranks, a dense exchange moves 2 (M - 1) / M n across each node's link, where
    a ring over all ranks moves 2 (R - 1) / R n. Inside a node everything is sent densely, and the compressor
    works on the node's mean; if all ranks of a node have the same tensor, that is the mean. Survey (arXiv
    2003.03009), hierarchical all-reduce.

    Attributes:
        by: "slices": each rank of a node sends 1 / G of the tensor between nodes, in G parallel streams.
            "leaders": the first rank of a node sends all of it. "turns": the ranks of a node send all of
            it in turn, one a round (DASO: Coquelin et al. 2021); for compressors without memory.
        far: how ranks with the same rank in their nodes exchange: `Flat` or `TwoPhase` on the axis "net", or
            whichever of them sends less; or `Uneven`, where the nodes' links differ.
        near: the ranks of a machine, and the machines of a place, where a place counts as a node: then
            there are three levels, and only 1 / (ranks of a machine) of the tensor leaves each rank for other
            machines of its place. (): one level inside. Without a mesh, `attach` fills it in where latencies
            show places.
    """

    by: Literal["slices", "leaders", "turns"] = "slices"
    far: OnAxis = Auto(NET)
    near: tuple[int, ...] = ()

    scope = WORLD
    meets = NET

    def __post_init__(self) -> None:
        checks.one_of("by", self.by, ("slices", "leaders", "turns"))
        if not isinstance(self.far, OnAxis) or self.far.axis != NET:
            raise ConfigError(
                f"far={self.far} is not on the axis between nodes: write Flat(axis='net') or "
                "TwoPhase(axis='net'), or leave it out"
            )

        check_numbers(
            "near",
            self.near,
            None,
            "write (8, 4) for places of four machines of eight ranks, or leave it out",
        )

    @property
    def needs_rates(self) -> bool:
        return self.far.needs_rates

    @property
    def uses_rates(self) -> bool:
        return self.far.uses_rates

    def for_rates(self, links: LinkRates) -> Hierarchical:
        """This topology, with the exchange between nodes adapted to their links' rates."""
        far = self.far.for_rates(links)
        assert isinstance(far, OnAxis)
        return replace(self, far=far)

    def of_places(self, near: tuple[int, ...]) -> Hierarchical:
        """This topology with these levels inside a node."""
        return replace(self, near=near)

    @property
    def without_nodes(self) -> OnAxis:
        return replace(self.far, axis=WORLD)

    @property
    def on_device(self) -> bool:
        return self.far.on_device

    @property
    def takes_variable_length(self) -> bool:
        return self.far.takes_variable_length

    def check(self, compressor: Compressor) -> None:
        """Refuse by="turns" for compressors with state: each rank of a node would keep another residual."""
        super().check(compressor)
        if self.by == "turns" and compressor.init(torch.empty(1, device="meta", dtype=torch.float32)):
            raise ConfigError(
                f"{compressor} has state, and ranks that send in turn would each have another one: write "
                "by='slices', or a compressor without state, such as BF16()"
            )

    def summary(self, compressors: Sequence[Compressor]) -> str:
        return f"{self.far.summary(compressors)} between {'places' if self.near else 'nodes'}"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return self.far.collectives(compressors)

    def options(self, compressors: Iterable[Compressor]) -> Options:
        options = self.far.options(compressors)
        ways = [far for far in options.topologies if isinstance(far, OnAxis)]
        return options._replace(topologies=tuple(replace(self, far=far) for far in ways))

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        return self.far.fields(compressor)

    def keeps(self, numel: int, compressor: Compressor, here: AxisRank) -> Mapping[str, tuple[int, int]]:
        """The state of the topology between nodes, for the span that this rank sends there."""
        return self.far.keeps(numel, compressor, here)

    def spans(self, edges: Sequence[int] | range, near: AxisRank) -> Spans:
        """Spans as equal as the edges allow; with "leaders" rank 0 has all, with "turns" every rank.

        Raises:
            ConfigError: the levels inside a node are of another number of ranks.
        """
        if self.near:
            schedules.refuse_product("Hierarchical", "near", self.near, near.peers)
        if self.by == "turns":
            return ((0, edges[-1]),) * near.peers
        if self.by == "leaders":
            return ((0, edges[-1]), *[(edges[-1], edges[-1])] * (near.peers - 1))
        cuts = [_nearest(edges, edges[-1] * i / near.peers) for i in range(near.peers + 1)]
        if not self.near:
            return tuple(pairwise(cuts))
        chunks = [schedules.chunk_of(rank, self.near) for rank in range(near.peers)]
        return tuple((cuts[chunk], cuts[chunk + 1]) for chunk in chunks)

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Three exchanges; the middle one is the compressor's."""
        if x is not ctx.out:
            ctx.out.copy_(x)
        if ctx.near.peers == 1:
            return (yield from self.far.conduct(ctx.out, compressor, state, ctx))
        spans = self._shares(x, ctx)
        if not ctx.replicated_in_node:
            yield from self._scattered(spans, ctx)
        if ctx.nonfinite_flags is not None:
            yield from average_(ctx.nonfinite_flags.numbers, NODE)
        start, stop = spans[ctx.near.rank]
        mine = ctx.out[start:stop]
        done = Outcome(mine, Exact(mine), state)
        if stop > start:
            finite_probe = ctx.finite_probe if ctx.replicated_in_node else None
            share, rescale = ctx.share * mine.numel() / x.numel(), cut_factors(ctx.rescale, start, stop)
            here = replace(ctx, out=mine, finite_probe=finite_probe, share=share, rescale=rescale)
            done = yield from self.far.conduct(mine, compressor, state, here)
        yield from self._gathered(spans, ctx)
        yield from _pass_on(ctx.nonfinite_flags, spans)
        return done._replace(mean=ctx.out, finite=False)

    @property
    def _staged(self) -> bool:
        return self.by == "slices" and len(self.near) > 1

    def _scattered(self, spans: Spans, ctx: Context) -> Generator[Request, Any, None]:
        """This rank's span of the mean of its node."""
        if not self._staged:
            yield ReduceScatter(ctx.out, spans, NODE, ctx.finite_probe)
            return
        divide_(ctx.out, ctx.near.peers, ctx.finite_probe)  # before the sum, which might overflow
        down, _ = schedules.by_levels(ctx.near.peers, self.near)
        yield from conducted(followed(down, ctx.out, ctx.inside("down"), ctx.near.rank, _edges(spans)), NODE)

    def _gathered(self, spans: Spans, ctx: Context) -> Generator[Request, Any, None]:
        """The spans of all ranks of the node."""
        if not self._staged:
            yield AllGatherInto(ctx.out, spans, NODE)
            return
        _, up = schedules.by_levels(ctx.near.peers, self.near)
        yield from conducted(followed(up, ctx.out, ctx.inside("up"), ctx.near.rank, _edges(spans)), NODE)

    def _shares(self, x: Tensor, ctx: Context) -> Spans:
        """The span that each rank of the node sends between nodes in this round."""
        if self.by != "turns":
            return ctx.spans
        # A dry run stands for all rounds, so every rank plans as the one that sends.
        first = ctx.near.rank if x.is_meta else ctx.round_index % ctx.near.peers
        n = x.numel()
        return tuple((n * (i > first), n * (i >= first)) for i in range(ctx.near.peers))


def _pass_on(flags: Flags | None, spans: Spans) -> Generator[Request, Any, None]:
    """Share the NaN flags in the node: ranks that exchanged nothing between nodes have only its flags."""
    speaks = [stop > start for start, stop in spans]
    if flags is None or all(speaks) or not any(speaks):
        return
    first = speaks.index(True)
    n = flags.numbers.numel()
    yield AllGatherInto(
        flags.numbers, tuple((n * (i > first), n * (i >= first)) for i in range(len(spans))), NODE
    )


def _edges(spans: Spans) -> tuple[int, ...]:
    """The starts of spans that lie side by side in any order, and the end of the last."""
    return tuple(accumulate((stop - start for start, stop in sorted(spans)), initial=0))


def _nearest(edges: Sequence[int] | range, target: float) -> int:
    i = bisect_left(edges, target)
    return min(edges[max(i - 1, 0) : i + 1], key=lambda edge: abs(edge - target))
