"""Each rank averages with a few neighbours only (D-PSGD, SGP, Gossip-PGA)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from tacit import checks
from tacit.contracts import ByLinks, Compressor, Context, LinkRates, MixingCompressor
from tacit.errors import ConfigError
from tacit.topologies.flat import reduce_flat
from tacit.topologies.link_graphs import gossip_weights
from tacit.topologies.matrices import Matrix, adds_up, check_size, check_square, columns, unreached
from tacit.topologies.mixing import Mixing, check_whole, global_rounds, is_global
from tacit.topologies.neighbours import NeighbourTopology

Graph: TypeAlias = Literal["ring", "exponential", "one-peer", "complete", "measured"]


@dataclass(frozen=True)
class Gossip(NeighbourTopology, ByLinks):
    """Each rank averages with its neighbours in a graph, by the rows of a doubly stochastic matrix W.

        answer_i = sum_j W_ij x_j

    Answers differ from rank to rank; their mean over the ranks is the mean of the inputs. So replicas differ,
    and come closer to each other the better the graph is connected. Of n bytes a rank sends n to each of its
    neighbours, however many ranks there are. Lian et al., NeurIPS 2017 (arXiv 1705.09056).

    Attributes:
        graph: the neighbours of each rank, with equal weights. "ring": to both neighbours. "exponential": to
            the ranks at distances 1, 2, 4, ..., and each receives from as many (Assran et al., ICML 2019,
            arXiv
            1811.10792). "one-peer": to one of these, to the next one in each round (the same paper; Ying et
            al., NeurIPS 2021, arXiv 2110.13363). "complete": to all. "measured": to those to whom
            links are fast, as measured when it is attached (`link_graphs.gossip_weights`). Or W itself, row
            by row.
        global_every: every so many rounds all ranks are averaged (Gossip-PGA: Chen et al., ICML 2021, arXiv
            2105.09080); 0: never.
    """

    graph: Graph | Matrix = "exponential"
    global_every: int = 0

    def __post_init__(self) -> None:
        checks.whole("global_every", self.global_every, 0, None, "write 0 for never")
        if isinstance(self.graph, str):
            checks.one_of("graph", self.graph, get_args(Graph))
        else:
            _check_matrix(self.graph)

    @property
    def needs_rates(self) -> bool:
        return self.graph == "measured"

    def for_rates(self, links: LinkRates) -> Gossip:
        """This topology with a matrix that prefers fast links."""
        return replace(self, graph=gossip_weights(links.of_ranks()))

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words on the graph."""
        graph = self.graph if isinstance(self.graph, str) else "a given"
        return f"neighbours in {graph} graph{global_rounds(self.global_every)}"

    def check_ranks(self, peers: int) -> None:
        if not self.needs_rates:
            super().check_ranks(peers)

    def check(self, compressor: Compressor) -> None:
        """Refuse lossy compressors, unless they handle their error (`MixingCompressor`)."""
        super().check(compressor)
        if isinstance(compressor, MixingCompressor):
            self._check_fixed(compressor)
            return
        check_whole(
            compressor, self, "every rank", "or BF16(), or, as CHOCO-SGD does, PublicCopy(TopK(ratio=0.01))"
        )

    def _check_fixed(self, compressor: MixingCompressor) -> None:
        """Refuse rounds with changing neighbours, if the compressor keeps a sum over them."""
        given = f"{compressor} with topology={self} is not possible, as"
        if self.global_every:
            raise ConfigError(
                f"{given} no rank has sent all of its replica when all are to be averaged: leave "
                "global_every out, and call session.sync() for a mean of all"
            )
        if compressor.fixed_graph and self.graph == "one-peer":
            raise ConfigError(
                f"{given} it keeps the sum of what its neighbours have sent, and this graph has another "
                'neighbour in each round: write graph="ring" or graph="exponential"'
            )

    def mixing(self, ctx: Context) -> Mixing:
        """The function that mixes all ranks in each `global_every`-th round, and neighbours in the others."""
        return reduce_flat if is_global(self.global_every, ctx) else super().mixing(ctx)

    def rows(self, peers: int, round_index: int) -> Matrix:
        """W for `peers` ranks in this round.

        Raises:
            ConfigError: the matrix is for another number of ranks.
        """
        steps = (0, *self.steps(peers, round_index))
        return tuple(
            tuple(
                self.weight(i, j, peers, len(steps)) if (i - j) % peers in steps else 0.0
                for j in range(peers)
            )
            for i in range(peers)
        )

    def steps(self, peers: int, round_index: int, seed: int = 0) -> tuple[int, ...]:
        if isinstance(self.graph, str):
            return _offsets(self.graph, peers, round_index)
        check_size(self.graph, peers, "exponential")
        return tuple(
            step for step in range(1, peers) if any(end is not None for end in self.ends(peers, step, 0))
        )

    def weight(self, i: int, j: int, peers: int, parties: int) -> float:
        return 1 / parties if isinstance(self.graph, str) else self.graph[i][j]

    def ends(self, peers: int, step: int, round_index: int, seed: int = 0) -> tuple[int | None, ...]:
        ends = [(rank + step) % peers for rank in range(peers)]
        if isinstance(self.graph, str):
            return tuple(ends)
        return tuple(end if self.graph[end][rank] else None for rank, end in enumerate(ends))


def _offsets(graph: str, peers: int, round_index: int) -> tuple[int, ...]:
    """The distances in ranks to which a rank sends."""
    if graph == "measured":
        raise ConfigError(
            'graph="measured" is made of links that are measured when it is attached: name another graph '
            "where nothing is attached, or write the matrix that link_graphs.gossip_weights gives"
        )
    powers = tuple(1 << k for k in range((peers - 1).bit_length()))
    if peers == 1:
        return ()
    if graph == "ring":
        return (1, peers - 1) if peers > 2 else (1,)
    if graph == "exponential":
        return powers
    if graph == "one-peer":
        return (powers[round_index % len(powers)],)
    return tuple(range(1, peers))


def _check_matrix(matrix: Matrix) -> None:
    """Refuse what is no doubly stochastic matrix of a connected graph; names the row or column."""
    check_square(matrix, "weights", get_args(Graph))
    for what, lines in (("row", matrix), ("column", columns(matrix))):
        for number, line in enumerate(lines):
            if not adds_up(line):
                raise ConfigError(
                    f"graph= is not doubly stochastic: {what} {number} adds up to {math.fsum(line):.6g}. "
                    "Each row and each column must add up to 1, or the mean of the replicas would drift"
                )
    if (lost := unreached(matrix)) is not None:
        raise ConfigError(
            f"graph= is not connected: nothing of rank 0 ever comes to rank {lost}, and they would never "
            "agree. Add an edge between the parts"
        )
