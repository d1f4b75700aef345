"""Products of a bucket's matrices with thin factors, as PowerSGD takes them: in few passes, or few launches.

Of each matrix M (rows x columns) in the flat x, P (rows x rank) and Q (columns x rank) lie by columns, matrix
after matrix. All return whether they did it: for types without a kernel, and for ranks too large for a GPU's
kernel, the caller uses torch's products.
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
    """P = M Q; with a residual, P = (M + residual) Q, and `total` becomes that sum: on the host only.

    Entries between the matrices are left alone in `total`.
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
    """M = P Q', and subtract P own' from the matrices of `rest`, at the same positions; on the host only."""
    return False


def prepare() -> None:
    """Compile now what runs on the host."""
    warm_up("products")
