"""`kernels.products` by Triton: each product of all of a bucket's matrices in one launch, or two.

A matrix is read once, in tiles of rows. A product is added up entry by entry in registers, and over the lanes
at the end, so it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.products import Place
from tacit.kernels.thread_scratch import current_stream, thread_scratch
from tacit.kernels.triton.launch import jit, launch

ROWS, COLUMNS, SPLIT = 16, 64, 128
"""Of the tile that a program works on; and the rows after which a column's product is begun anew."""
WIDE = 256
"""Columns of the tile of a product that is written."""
LARGEST_RANK = 16
"""What a program holds in registers."""
PIECE = 1024
"""Entries of a factor that a program adds up."""
FIELDS = tl.constexpr(6)
"""Numbers of a matrix: where it, its P, its Q and its partial sums begin; its rows and columns."""


@jit
def matrix_of(table: tensor, tiles: tensor) -> tensor:
    """This program's matrix, and which of its tiles it works on; see `FIELDS`."""
    at = table + FIELDS * (tl.program_id(0) // tiles)
    at_x, at_p, at_q, at_sums = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    rows, columns = tl.load(at + 4), tl.load(at + 5)
    return at_x, at_p, at_q, at_sums, rows, columns, tl.program_id(0) % tiles


@jit
def times_q_kernel(
    x: tensor, p: tensor, q: tensor, table: tensor, tiles: tensor, rank: tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
) -> None:  # fmt: skip
    """P = M Q, of ROWS rows."""
    at_x, at_p, at_q, _, rows, columns, tile = matrix_of(table, tiles)
    if tile * ROWS < rows:
        i, r = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK)
        total = tl.zeros((ROWS, RANK, COLUMNS), tl.float32)
        for begin in range(0, columns, COLUMNS):
            j = begin + tl.arange(0, COLUMNS)
            here = (i < rows)[:, None] & (j < columns)[None, :]
            a = tl.load(x + at_x + i.to(tl.int64)[:, None] * columns + j[None, :], here, 0.0)
            b = tl.load(
                q + at_q + r[:, None] * columns + j[None, :],
                (r < rank)[:, None] & (j < columns)[None, :],
                0.0,
            )
            total += a[:, None, :] * b[None, :, :]
        inside = (i < rows)[:, None] & (r < rank)[None, :]
        tl.store(p + at_p + r[None, :] * rows + i[:, None], tl.sum(total, axis=2), inside)


@jit
def times_p_kernel(
    x: tensor, p: tensor, sums: tensor, table: tensor, tiles: tensor, rank: tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, RANK: tl.constexpr,
) -> None:  # fmt: skip
    """The part of Q = M' P that SPLIT rows make, of COLUMNS columns."""
    at_x, at_p, _, at_sums, rows, columns, tile = matrix_of(table, tiles)
    across = (columns + COLUMNS - 1) // COLUMNS
    split = tile // across
    if split * SPLIT < rows:
        j, r = (tile % across) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
        total = tl.zeros((RANK, ROWS, COLUMNS), tl.float32)
        for begin in range(split * SPLIT, tl.minimum(rows, (split + 1) * SPLIT), ROWS):
            i = begin + tl.arange(0, ROWS)
            here = (i < rows)[:, None] & (j < columns)[None, :]
            a = tl.load(x + at_x + i.to(tl.int64)[:, None] * columns + j[None, :], here, 0.0)
            inside = (r < rank)[:, None] & (i < rows)[None, :]
            b = tl.load(p + at_p + r[:, None] * rows + i[None, :], inside, 0.0)
            total += a[None, :, :] * b[:, :, None]
        at = sums + at_sums + (split * rank + r[:, None]) * columns + j[None, :]
        tl.store(at, tl.sum(total, axis=1), (r < rank)[:, None] & (j < columns)[None, :])


@jit
def add_parts_kernel(
    sums: tensor, q: tensor, table: tensor, tiles: tensor, rank: tensor,
    PIECE: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Q as the sum of its parts, from the first rows on."""
    _, _, at_q, at_sums, rows, columns, tile = matrix_of(table, tiles)
    place = tile * PIECE + tl.arange(0, PIECE)
    inside = place < rank * columns
    total = tl.zeros((PIECE,), tl.float32)
    for split in range((rows + SPLIT - 1) // SPLIT):
        total += tl.load(sums + at_sums + split * rank * columns + place, inside, 0.0)
    tl.store(q + at_q + place, total, inside)


@jit
def expand_kernel(
    x: tensor, p: tensor, q: tensor, table: tensor, tiles: tensor, rank: tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUBTRACT: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of M = P Q', or of M - P Q'."""
    at_x, at_p, at_q, _, rows, columns, tile = matrix_of(table, tiles)
    across = (columns + COLUMNS - 1) // COLUMNS
    first = tile // across * ROWS
    if first < rows:
        i, j = first + tl.arange(0, ROWS), (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        here = (i < rows)[:, None] & (j < columns)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for r in range(rank):
            a = tl.load(p + at_p + r * rows + i, i < rows, 0.0)
            b = tl.load(q + at_q + r * columns + j, j < columns, 0.0)
            total += a[:, None] * b[None, :]
        at = x + at_x + i.to(tl.int64)[:, None] * columns + j[None, :]
        if SUBTRACT:
            total = tl.load(at, here, 0.0) - total
        tl.store(at, total, here)


def times_q_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int,
    residual: Tensor | None = None, total: Tensor | None = None,
) -> bool:  # fmt: skip
    """See `kernels.products`."""
    if rank > LARGEST_RANK or residual is not None:
        return False
    tiles = max(triton.cdiv(rows, ROWS) for _, rows, _ in matrices)
    launch(
        times_q_kernel, tiles * len(matrices), x, x, p, q, _table_for(x, matrices, rank), tiles, rank,
        ROWS=ROWS, COLUMNS=COLUMNS, RANK=triton.next_power_of_2(rank),
    )  # fmt: skip
    return True


def times_p_(x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int) -> bool:
    """See `kernels.products`."""
    if rank > LARGEST_RANK:
        return False
    table = _table_for(x, matrices, rank)
    sums = thread_scratch("products", sum(_parts(matrices, rank)), x.dtype, x.device)
    tiles = max(triton.cdiv(rows, SPLIT) * triton.cdiv(columns, COLUMNS) for _, rows, columns in matrices)
    launch(
        times_p_kernel, tiles * len(matrices), x, x, p, sums, table, tiles, rank,
        ROWS=ROWS, COLUMNS=COLUMNS, SPLIT=SPLIT, RANK=triton.next_power_of_2(rank),
    )  # fmt: skip
    tiles = max(triton.cdiv(rank * columns, PIECE) for *_, columns in matrices)
    launch(add_parts_kernel, tiles * len(matrices), x, sums, q, table, tiles, rank, PIECE=PIECE, SPLIT=SPLIT)
    return True


def expand_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int, subtract: bool = False
) -> bool:
    """See `kernels.products`."""
    if rank > LARGEST_RANK:
        return False
    tiles = max(triton.cdiv(rows, ROWS) * triton.cdiv(columns, WIDE) for _, rows, columns in matrices)
    launch(
        expand_kernel, tiles * len(matrices), x, x, p, q, _table_for(x, matrices, rank), tiles, rank,
        ROWS=ROWS, COLUMNS=WIDE, SUBTRACT=subtract,
    )  # fmt: skip
    return True


def _parts(matrices: Sequence[Place], rank: int) -> list[int]:
    """How many numbers the partial sums of each matrix are."""
    return [triton.cdiv(rows, SPLIT) * rank * columns for _, rows, columns in matrices]


def _table_for(x: Tensor, matrices: Sequence[Place], rank: int) -> Tensor:
    return _table(tuple(matrices), rank, x.device, current_stream(x.device))


@lru_cache(maxsize=256)
def _table(matrices: tuple[Place, ...], rank: int, device: torch.device, stream: int) -> Tensor:
    """See `FIELDS`; filled in, as the host would wait for a copy."""
    table = torch.empty((len(matrices), FIELDS.value), dtype=torch.int64, device=device)
    at_p, at_q, at_sums = (
        [0, *accumulate(sizes)]
        for sizes in (
            [rows * rank for _, rows, _ in matrices],
            [columns * rank for *_, columns in matrices],
            _parts(matrices, rank),
        )
    )
    for i, (start, rows, columns) in enumerate(matrices):
        for field, value in enumerate((start, at_p[i], at_q[i], at_sums[i], rows, columns)):
            table[i, field].fill_(value)
    return table
