"""`kernels.orthogonal` by Triton: one program a matrix, all matrices in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.thread_scratch import current_stream
from tacit.kernels.triton.launch import jit, launch
from tacit.kernels.triton.primitives import INFINITY, MAGNITUDE

PIECE, WARPS = 2048, 8
"""Entries of a row that a program looks at together."""
TINY, DEPENDENT = tl.constexpr(2.0**-126), tl.constexpr(1e-6)


@jit
def largest_bits(row: tensor, length: tensor, PIECE: tl.constexpr) -> tensor:
    """The bits of a row's largest magnitude; those of a NaN are larger than all."""
    inside = tl.arange(0, PIECE)
    most = tl.zeros((PIECE,), tl.int32)
    for begin in range(0, length, PIECE):
        a = tl.load(row + begin + inside, begin + inside < length, 0.0)
        most = tl.maximum(most, a.to(tl.int32, bitcast=True) & MAGNITUDE)
    return tl.max(most, axis=0)


@jit
def multiply(row: tensor, length: tensor, factor: tensor, PIECE: tl.constexpr) -> tensor:
    """Multiply a row in place; its length afterwards."""
    inside = tl.arange(0, PIECE)
    total = tl.zeros((PIECE,), tl.float32)
    for begin in range(0, length, PIECE):
        mask = begin + inside < length
        a = tl.load(row + begin + inside, mask, 0.0) * factor
        tl.store(row + begin + inside, a, mask)
        total += a * a
    tl.debug_barrier()
    return tl.sqrt_rn(tl.sum(total, axis=0))


@jit
def subtract_projection(row: tensor, other: tensor, length: tensor, PIECE: tl.constexpr) -> tensor:
    """Subtract a row's projection on the other row, of length 1; its length afterwards."""
    inside = tl.arange(0, PIECE)
    total = tl.zeros((PIECE,), tl.float32)
    for begin in range(0, length, PIECE):
        mask = begin + inside < length
        total += tl.load(row + begin + inside, mask, 0.0) * tl.load(other + begin + inside, mask, 0.0)
    times = tl.sum(total, axis=0)
    total = tl.zeros((PIECE,), tl.float32)
    for begin in range(0, length, PIECE):
        mask = begin + inside < length
        a = tl.load(row + begin + inside, mask, 0.0)
        a -= times * tl.load(other + begin + inside, mask, 0.0)
        tl.store(row + begin + inside, a, mask)
        total += a * a
    tl.debug_barrier()
    return tl.sqrt_rn(tl.sum(total, axis=0))


@jit
def scale_kernel(q: tensor, table: tensor, rank: tensor, PIECE: tl.constexpr) -> None:
    """See `orthogonal.scale_`."""
    row = q + tl.load(table + 2 * tl.program_id(0))
    length = tl.load(table + 2 * tl.program_id(0) + 1)
    for _ in range(rank):
        bits = largest_bits(row, length, PIECE)
        exponent = tl.minimum(tl.maximum((bits >> 23) - 126, -126), 126)
        exponent = tl.where((bits == 0) | (bits >= INFINITY), 0, exponent)
        multiply(row, length, ((127 - exponent) << 23).to(tl.float32, bitcast=True), PIECE)
        row += length


@jit
def orthogonalize_kernel(p: tensor, table: tensor, rank: tensor, PIECE: tl.constexpr) -> None:
    """See `orthogonal.orthogonalize_`."""
    first = p + tl.load(table + 2 * tl.program_id(0))
    length = tl.load(table + 2 * tl.program_id(0) + 1)
    for i in range(rank):
        row = first + i * length
        scale = largest_bits(row, length, PIECE).to(tl.float32, bitcast=True)
        large = scale >= TINY
        factor = tl.where(large, tl.div_rn(1.0, tl.where(large, scale, 1.0)), 0.0)
        norm = multiply(row, length, factor, PIECE)
        rest = norm
        for _ in range(2):
            for j in range(i):
                rest = subtract_projection(row, first + j * length, length, PIECE)
        left = rest > norm * DEPENDENT
        multiply(row, length, tl.where(left, tl.div_rn(1.0, tl.where(left, rest, 1.0)), 0.0), PIECE)


def scale_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """See `kernels.orthogonal`."""
    launch(scale_kernel, len(lengths), q, q, _table_for(q, lengths, rank), rank, PIECE=PIECE, num_warps=WARPS)


def orthogonalize_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """See `kernels.orthogonal`."""
    table = _table_for(p, lengths, rank)
    launch(orthogonalize_kernel, len(lengths), p, p, table, rank, PIECE=PIECE, num_warps=WARPS)


def _table_for(p: Tensor, lengths: Sequence[int], rank: int) -> Tensor:
    return _table(tuple(lengths), rank, p.device, current_stream(p.device))


@lru_cache(maxsize=256)
def _table(lengths: tuple[int, ...], rank: int, device: torch.device, stream: int) -> Tensor:
    """Where each matrix begins, and the length of its rows; filled in, as the host would wait for a copy."""
    table = torch.empty((len(lengths), 2), dtype=torch.int64, device=device)
    at = 0
    for i, length in enumerate(lengths):
        table[i, 0].fill_(at)
        table[i, 1].fill_(length)
        at += rank * length
    return table
