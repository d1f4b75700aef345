"""Products of a bucket's matrices with thin factors, as PowerSGD takes them: in few passes, or few launches.

Of each matrix M (rows x columns) in the flat x, P (rows x rank) and Q (columns x rank) lie by columns, matrix
after matrix. All answer whether they did it: of types that no kernel was written for, and of ranks that a GPU
does not hold, the caller takes torch's own products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from tacit.kernels.dispatch import FP32, kernel, warm_up

Place: TypeAlias = tuple[int, int, int]
"""Where a matrix begins in x, and its rows and columns."""


@kernel("x", "p", "q", "residual", "total", triton=FP32)
def times_q_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int,
    residual: Tensor | None = None, total: Tensor | None = None,
) -> bool:  # fmt: skip
    """P = M Q; where there is a residual, of M + residual, which `total` becomes: on the host alone.

    What lies between the matrices is left alone in `total`.
    """
    return False


@kernel("x", "p", "q", triton=FP32)
def times_p_(x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int) -> bool:
    """Q = M' P."""
    return False


@kernel("x", "p", "q", triton=FP32)
def expand_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int, subtract: bool = False
) -> bool:
    """M = P Q', or M - P Q'."""
    return False


@kernel("x", "rest", "p", "q", "own", triton=())
def expand_and_subtract_(
    x: Tensor, rest: Tensor, p: Tensor, q: Tensor, own: Tensor, matrices: Sequence[Place], rank: int
) -> bool:
    """M = P Q', and of `rest`, which has matrices in the same places, M - P own'; on the host alone."""
    return False


def prepare() -> None:
    """Compile now what runs on the host."""
    warm_up("products")
