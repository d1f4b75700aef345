"""Each rank sends shares of itself along directed edges, and gets what others send to it (SGP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from tacit import checks
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.topologies.matrices import Matrix, adds_up, check_size, check_square, columns, unreached
from tacit.topologies.neighbours import NeighbourTopology

DirectedGraph: TypeAlias = Literal["one-way", "star"]


@dataclass(frozen=True)
class Directed(NeighbourTopology):
    """Each rank sends shares of what it has along directed edges, by the columns of a matrix P.

        answer_i = sum_j P_ij x_j,    where each column adds up to 1

    As each column adds up to 1, the sum over all ranks stays the same. Rows need not, so a rank may get more
    than it gives, and `PushSum` divides by the weight that has arrived. Assran et al., ICML 2019 (arXiv
    1811.10792).

    Attributes:
        graph: who sends to whom; each rank has equal shares for itself and for all to whom it sends.
            "one-way": to the next rank in a ring. "star": rank 0 to all, and all to rank 0. Or P itself, row
            by row: P_ij is the share of rank j that goes to rank i.
    """

    graph: DirectedGraph | Matrix = "one-way"

    def __post_init__(self) -> None:
        if isinstance(self.graph, str):
            checks.one_of("graph", self.graph, get_args(DirectedGraph))
        else:
            _check_matrix(self.graph)

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """The graph."""
        return f"shares along {self.graph if isinstance(self.graph, str) else 'a given'} graph"

    def check(self, compressor: Compressor) -> None:
        """Refuse what does not send its weight along."""
        super().check(compressor)
        if not compressor.weighed:
            raise ConfigError(
                f"compressor={compressor} with {self} would let replicas grow or shrink, as more comes to a "
                "rank than it gives away: write compressor=PushSum(), or topology=Gossip()"
            )

    def rows(self, peers: int) -> Matrix:
        """P for so many ranks.

        Raises:
            ConfigError: the matrix is for another number of ranks.
        """
        if isinstance(self.graph, str):
            return _named(self.graph, peers)
        check_size(self.graph, peers, "one-way")
        return self.graph

    def steps(self, peers: int, round_index: int, seed: int = 0) -> tuple[int, ...]:
        p = self.rows(peers)
        return tuple(step for step in range(1, peers) if any(p[(j + step) % peers][j] for j in range(peers)))

    def ends(self, peers: int, step: int, round_index: int, seed: int = 0) -> tuple[int | None, ...]:
        p = self.rows(peers)
        ends = [(j + step) % peers for j in range(peers)]
        return tuple(end if p[end][j] else None for j, end in enumerate(ends))

    def weight(self, i: int, j: int, peers: int, parties: int) -> float:
        return self.rows(peers)[i][j]


@lru_cache(maxsize=64)
def _named(graph: str, peers: int) -> Matrix:
    """P of a graph: equal shares of each rank for itself and all to whom it sends."""
    if graph == "one-way":
        sends = [{j, (j + 1) % peers} for j in range(peers)]
    else:
        sends = [{*range(peers)} if j == 0 else {0, j} for j in range(peers)]
    return tuple(
        tuple(1 / len(sends[j]) if i in sends[j] else 0.0 for j in range(peers)) for i in range(peers)
    )


def _check_matrix(matrix: Matrix) -> None:
    """Refuse what is no column-stochastic matrix of a connected graph; names the column or rank."""
    check_square(matrix, "shares", get_args(DirectedGraph))
    for number, column in enumerate(columns(matrix)):
        if not adds_up(column):
            raise ConfigError(
                f"graph= is not column-stochastic: column {number} adds up to {math.fsum(column):.6g}. It is "
                f"what rank {number} gives away and keeps, and must add up to 1"
            )
        if not column[number]:
            raise ConfigError(
                f"graph= gives away all that rank {number} has: it must keep a share, or its weight may "
                f"become 0. Write more than 0 in row {number} of column {number}"
            )
    for backwards, edges in enumerate((matrix, columns(matrix))):
        if (lost := unreached(edges)) is not None:
            ends = (lost, 0) if backwards else (0, lost)
            raise ConfigError(
                f"graph= is not connected: nothing of rank {ends[0]} ever comes to rank {ends[1]}, and they "
                "would never agree. Add an edge, so that each rank can be reached from each"
            )
