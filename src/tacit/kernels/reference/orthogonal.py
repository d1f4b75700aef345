"""`kernels.orthogonal` in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TINY = 2.0**-126
"""A row whose largest magnitude is below it counts as zeros."""
LARGEST_EXPONENT = 126
"""2^126 and its inverse are numbers of fp32."""
DEPENDENT = 1e-6
"""A row of which only this share of its length is left depends on those before it; of half types, more."""


def scale_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """`kernels.orthogonal.scale_`, equal to the last bit."""
    most = 14 if q.dtype == torch.float16 else LARGEST_EXPONENT
    for rows in _matrices(q, lengths, rank):
        if rows.numel():
            largest = rows.abs().amax(1, keepdim=True)
            if q.dtype != torch.float64:
                largest = largest.float()  # not all devices implement frexp for bf16
            exponent = torch.frexp(largest).exponent.clamp_(-most, most)
            power = ((127 - exponent) << 23).view(torch.float32)  # as torch.ldexp is exact on the CPU only
            rows.mul_(power.to(q.dtype))


def orthogonalize_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """`kernels.orthogonal.orthogonalize_`, equal but for rounding."""
    limits = torch.finfo(p.dtype)
    least, dependent = max(TINY, limits.smallest_normal), max(DEPENDENT, 2 * limits.eps)
    for basis in _matrices(p, lengths, rank):
        for i, row in enumerate(basis if basis.numel() else ()):
            scale = row.abs().amax()
            row.mul_(torch.where(scale >= least, 1 / scale, 0))
            norm = rest = torch.linalg.vector_norm(row)
            for _ in range(2 if i else 0):
                row.addmv_(basis[:i].t(), basis[:i] @ row, alpha=-1)
                rest = torch.linalg.vector_norm(row)
            row.mul_(torch.where(rest > dependent * norm, 1 / rest, 0))


def _matrices(flat: Tensor, lengths: Sequence[int], rank: int) -> Iterator[Tensor]:
    at = 0
    for length in lengths:
        yield flat[at : at + rank * length].view(rank, length)
        at += rank * length
