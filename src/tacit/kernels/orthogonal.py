"""Rows brought to one scale, and rows made orthogonal: what PowerSGD does to Q and to P."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import FP32, REALS, kernel


@kernel("q", numba=REALS, triton=FP32)
def scale_(q: Tensor, lengths: Sequence[int], rank: int) -> None:
    """Bring each row's largest magnitude near 1, in place, by a power of two: that costs no bits.

    Args:
        q: flat; matrices one after the other, each of `rank` rows.
        lengths: of a row, matrix by matrix.
    """


@kernel("p", numba=REALS, triton=FP32)
def orthogonalize_(p: Tensor, lengths: Sequence[int], rank: int) -> None:
    """Gram-Schmidt in place, twice over, as the second time removes what rounding left in the first.

    A row that depends on those before it becomes zeros. Rows are scaled first, so that no square overflows or
    vanishes. What is not finite becomes NaN. The three versions differ by rounding.

    Args:
        p: flat; matrices one after the other, each of `rank` rows.
        lengths: of a row, matrix by matrix.
    """
