"""Rows brought to one scale, and rows made orthogonal: what PowerSGD does to Q and to P."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import numba_kernels, numba_takes, run_triton, triton_takes_fp32, warm_up
from tacit.kernels.reference import orthogonal as reference


def scale_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """Bring each row's largest magnitude near 1, in place, by a power of two: that costs no bits.

    Args:
        q: flat; matrices one after the other, each of `rank` rows.
        lengths: of a row, matrix by matrix.
    """
    if q.is_meta:
        warm_up("orthogonal")
    elif numba_takes(q):
        numba_kernels("orthogonal").scale(q.detach().numpy(), np.array(lengths, np.int64), rank)
    elif not (triton_takes_fp32(q) and run_triton("orthogonal.scale", q, lengths, rank)):
        reference.scale_(q, lengths, rank)


def orthogonalize_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """Gram-Schmidt in place, twice over, as the second time removes what rounding left in the first.

    A row that depends on those before it becomes zeros. Rows are scaled first, so that no square overflows or
    vanishes. What is not finite becomes NaN. The three versions differ by rounding.

    Args:
        p: flat; matrices one after the other, each of `rank` rows.
        lengths: of a row, matrix by matrix.
    """
    if p.is_meta:
        warm_up("orthogonal")
    elif numba_takes(p):
        numba_kernels("orthogonal").orthogonalize(p.detach().numpy(), np.array(lengths, np.int64), rank)
    elif not (triton_takes_fp32(p) and run_triton("orthogonal.orthogonalize", p, lengths, rank)):
        reference.orthogonalize_(p, lengths, rank)
