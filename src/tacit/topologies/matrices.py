"""Matrices of weights, by which ranks mix: their checks, and which ranks are connected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from tacit.errors import ConfigError

Matrix: TypeAlias = tuple[tuple[float, ...], ...]
"""W: row by row, the weight of what rank j sends in the answer of rank i."""

_ROUNDING = 1e-6


def check_square(matrix: object, entries: str, graphs: Sequence[str]) -> None:
    """Refuse what is no square tuple of tuples of numbers from 0 to 1.

    Args:
        matrix: the value of `graph`.
        entries: what its numbers are, for the message.
        graphs: names that could be written instead.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(matrix, tuple) or not matrix or not all(_is_row(row, len(matrix)) for row in matrix):
        raise ConfigError(
            f"graph={matrix!r:.80} is no square matrix of {entries}: write a tuple of tuples of numbers from "
            f"0 to 1, as many as there are ranks, or one of {', '.join(graphs)}"
        )


def check_size(matrix: Matrix, peers: int, graph: str) -> None:
    """Refuse a matrix for another number of ranks; `graph` could be written instead.

    Raises:
        ConfigError: it has more or fewer rows than there are ranks.
    """
    if len(matrix) != peers:
        raise ConfigError(
            f"graph= has {len(matrix)} rows, and there are {peers} ranks: write a row for each rank, or the "
            f'name of a graph, such as "{graph}"'
        )


def columns(matrix: Matrix) -> Matrix:
    """Its columns, as rows."""
    return tuple(zip(*matrix, strict=True))


def adds_up(line: Sequence[float]) -> bool:
    """Whether a row or a column adds up to 1, but for rounding."""
    return abs(math.fsum(line) - 1) <= _ROUNDING


def unreached(matrix: Matrix) -> int | None:
    """The first rank to which nothing of rank 0 ever comes; None: something comes to all."""
    found, new, ranks = {0}, [0], range(len(matrix))
    while new:
        j = new.pop()
        more = {i for i in ranks if matrix[i][j] > 0} - found
        found |= more
        new.extend(more)
    return min(set(ranks) - found, default=None)


def _is_row(row: object, size: int) -> bool:
    return (
        isinstance(row, tuple)
        and len(row) == size
        and all(isinstance(each, int | float) and 0 <= each <= 1 for each in row)
    )
