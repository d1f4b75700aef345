"""The Triton version of the pass of `select` over memory that finds what reaches a threshold."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.cuda.launch import jitted, start

PIECE = 4096
"""Entries that one program looks at."""


@jitted
def looked(
    x: tensor,
    residual: tensor,
    numel: tensor,
    threshold: tensor,
    PIECE: tl.constexpr,
    OWES: tl.constexpr,
) -> tensor:
    """Places, which of them there are, the entries there, and which are hits; a NaN is none."""
    place = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    mask = place < numel
    a = tl.load(x + place, mask, 0.0)
    if OWES:
        a += tl.load(residual + place, mask, 0.0)
    return place, mask, a, (tl.abs(a) >= threshold) & mask


@jitted
def count_kernel(
    x: tensor,
    residual: tensor,
    counts: tensor,
    numel: tensor,
    threshold: tensor,
    PIECE: tl.constexpr,
    OWES: tl.constexpr,
) -> None:
    """How many hits each piece has."""
    _, _, _, hit = looked(x, residual, numel, threshold, PIECE, OWES)
    tl.store(counts + tl.program_id(0), tl.sum(hit.to(tl.int32), axis=0))


@jitted
def sift_kernel(
    x: tensor, residual: tensor, new_residual: tensor, ends: tensor, index: tensor, values: tensor,
    numel: tensor, threshold: tensor, PIECE: tl.constexpr, OWES: tl.constexpr,
) -> None:  # fmt: skip
    """Write the hits of each piece from where those of the piece before end, and what is left to `owed`."""
    piece = tl.program_id(0)
    place, mask, a, hit = looked(x, residual, numel, threshold, PIECE, OWES)
    found = tl.cumsum(hit.to(tl.int32), axis=0)
    end = tl.load(ends + piece)
    at = end - tl.sum(hit.to(tl.int32), axis=0) + found - 1
    tl.store(index + at, place.to(tl.int32), hit)
    tl.store(values + at, a, hit)
    if OWES:
        tl.store(new_residual + place, tl.where(hit, 0.0, a), mask)


def sift(
    x: Tensor,
    threshold: float,
    index: Tensor,
    values: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
) -> int:
    """`select.sift`: how many were found, or -1 where there is no room; nothing has been written then.

    Two passes read x + residual, one to count and one to write; in between the host waits for the count.
    """
    has_feedback = residual is not None and new_residual is not None
    before, after = (residual if has_feedback else x), (new_residual if has_feedback else x)
    pieces = -(-x.numel() // PIECE)
    counts = torch.zeros(pieces, dtype=torch.int32, device=x.device)
    start(count_kernel, pieces, x, x, before, counts, x.numel(), threshold, PIECE=PIECE, OWES=has_feedback)
    ends = counts.cumsum(0)
    found = int(ends[-1]) if pieces else 0
    if found > index.numel():
        return -1
    start(
        sift_kernel, pieces, x, x, before, after, ends, index, values, x.numel(), threshold,
        PIECE=PIECE, OWES=has_feedback,
    )  # fmt: skip
    return found
