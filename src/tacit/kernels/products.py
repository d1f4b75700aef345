"""Products of a bucket's matrices with thin factors, as PowerSGD takes them, in few launches on a GPU.

Of each matrix M (rows x columns) in the flat x, P (rows x rank) and Q (columns x rank) lie by columns, matrix
after matrix. All answer whether they did it: on the host, and of types and ranks that no kernel was written
for, torch's own products are as fast, and the caller takes those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from tacit.kernels.dispatch import on_host, run_triton, triton_takes_fp32

Place: TypeAlias = tuple[int, int, int]
"""Where a matrix begins in x, and its rows and columns."""
LARGEST_RANK = 16
"""What a program holds in registers."""


def times_q_(x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int) -> bool:
    """P = M Q."""
    return _takes(x, p, q, rank) and run_triton("products.times_q", x, p, q, matrices, rank)


def times_p_(x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int) -> bool:
    """Q = M' P."""
    return _takes(x, p, q, rank) and run_triton("products.times_p", x, p, q, matrices, rank)


def expand_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int, subtract: bool = False
) -> bool:
    """M = P Q', or M - P Q'."""
    return _takes(x, p, q, rank) and run_triton("products.expand", x, p, q, matrices, rank, subtract)


def _takes(x: Tensor, p: Tensor, q: Tensor, rank: int) -> bool:
    return not on_host(x) and not x.is_meta and rank <= LARGEST_RANK and triton_takes_fp32(x, p, q)
