"""Rows brought to one scale, and rows made orthogonal: what PowerSGD does to Q and to P."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tacit.kernels.pick import by_triton, fits, fits_triton32, path, warming

TINY = 2.0**-126
"""A row whose largest magnitude is below it counts as zeros."""
MOST = 126
"""2^126 and its inverse are numbers of fp32."""
DEPENDENT = 1e-6
"""A row of which only this share of its length is left depends on those before it; of half types, more."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.gram  # noqa: F401


def scale_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """Bring each row's largest magnitude near 1, in place, by a power of two: that costs no bits.

    Args:
        q: flat; matrices one after the other, each of `rank` rows.
        lengths: of a row, matrix by matrix.
    """
    if q.is_meta:
        warm_up(warming())
    elif fits(q):
        import numpy as np

        from tacit.kernels.gram import scale

        scale(q.detach().numpy(), np.array(lengths, np.int64), rank)
    elif not (fits_triton32(q) and by_triton("orthogonal.scale", q, lengths, rank)):
        scale_torch_(q, lengths, rank)


def orthogonalize_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """Gram-Schmidt in place, twice over, as the second time removes what rounding left in the first.

    A row that depends on those before it becomes zeros. Rows are scaled first, so that no square overflows or
    vanishes. What is not finite becomes NaN.

    Args:
        p: flat; matrices one after the other, each of `rank` rows.
        lengths: of a row, matrix by matrix.
    """
    if p.is_meta:
        warm_up(warming())
    elif fits(p):
        import numpy as np

        from tacit.kernels.gram import orthogonalize

        orthogonalize(p.detach().numpy(), np.array(lengths, np.int64), rank)
    elif not (fits_triton32(p) and by_triton("orthogonal.orthogonalize", p, lengths, rank)):
        orthogonalize_torch_(p, lengths, rank)


# ---- the reference ------------------------------------------------------------------------------------


def scale_torch_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """The reference: `scale_` in plain torch, equal to the last bit."""
    most = 14 if q.dtype == torch.float16 else MOST
    for rows in _matrices(q, lengths, rank):
        if rows.numel():
            largest = rows.abs().amax(1, keepdim=True)
            if q.dtype != torch.float64:
                largest = largest.float()  # not all devices take bf16 apart
            exponent = torch.frexp(largest).exponent.clamp_(-most, most)
            power = ((127 - exponent) << 23).view(torch.float32)  # as torch.ldexp is exact on the CPU only
            rows.mul_(power.to(q.dtype))


def orthogonalize_torch_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """The reference: `orthogonalize_` in plain torch, equal but for rounding."""
    kind = torch.finfo(p.dtype)
    least, dependent = max(TINY, kind.smallest_normal), max(DEPENDENT, 2 * kind.eps)
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
