"""Products of a bucket's matrices with thin factors, as PowerSGD takes them: in few passes, or few launches.

Of each matrix M (rows x columns) in the flat x, P (rows x rank) and Q (columns x rank) lie by columns, matrix
after matrix. All answer whether they did it: of types that no kernel was written for, and of ranks that a GPU
does not hold, the caller takes torch's own products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from tacit.kernels.dispatch import (
    numba_kernels,
    numba_takes_fp32,
    on_host,
    run_triton,
    triton_takes_fp32,
    warm_up,
)

Place: TypeAlias = tuple[int, int, int]
"""Where a matrix begins in x, and its rows and columns."""
LARGEST_RANK = 16
"""What a program holds in registers."""


def times_q_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int,
    residual: Tensor | None = None, total: Tensor | None = None,
) -> bool:  # fmt: skip
    """P = M Q; where there is a residual, of M + residual, which `total` becomes: on the host alone.

    What lies between the matrices is left alone in `total`.
    """
    if residual is None or total is None:
        if numba_takes_fp32(x, p, q):
            _times_q(x, 0, 0, p, q, matrices, rank)
            return True
        return _launches(x, p, q, rank) and run_triton("products.times_q", x, p, q, matrices, rank)
    if not numba_takes_fp32(x, p, q, residual, total):
        return False
    _times_q(x, residual.data_ptr(), total.data_ptr(), p, q, matrices, rank)
    return True


def times_p_(x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int) -> bool:
    """Q = M' P."""
    if numba_takes_fp32(x, p, q):
        kernels = numba_kernels("products")
        kernels.times_p(x.data_ptr(), _array(matrices), rank, p.data_ptr(), q.data_ptr(), kernels.ZEROS_AT)
        return True
    return _launches(x, p, q, rank) and run_triton("products.times_p", x, p, q, matrices, rank)


def expand_(
    x: Tensor, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int, subtract: bool = False
) -> bool:
    """M = P Q', or M - P Q'."""
    if numba_takes_fp32(x, p, q):
        out, rest = (0, x.data_ptr()) if subtract else (x.data_ptr(), 0)
        _expand(out, rest, p, q, q, matrices, rank)
        return True
    return _launches(x, p, q, rank) and run_triton("products.expand", x, p, q, matrices, rank, subtract)


def expand_and_subtract_(
    x: Tensor, rest: Tensor, p: Tensor, q: Tensor, own: Tensor, matrices: Sequence[Place], rank: int
) -> bool:
    """M = P Q', and of `rest`, which has matrices in the same places, M - P own'; on the host alone."""
    if not numba_takes_fp32(x, rest, p, q, own):
        return False
    _expand(x.data_ptr(), rest.data_ptr(), p, q, own, matrices, rank)
    return True


def prepare() -> None:
    """Compile now what runs on the host."""
    warm_up("products")


def _times_q(
    x: Tensor, residual: int, total: int, p: Tensor, q: Tensor, matrices: Sequence[Place], rank: int
) -> None:
    kernels, places = numba_kernels("products"), _array(matrices)
    kernels.times_q(x.data_ptr(), residual, total, places, rank, p.data_ptr(), q.data_ptr(), kernels.ZEROS_AT)


def _expand(
    out: int, rest: int, p: Tensor, q: Tensor, own: Tensor, matrices: Sequence[Place], rank: int
) -> None:
    kernels, places = numba_kernels("products"), _array(matrices)
    kernels.expand(out, rest, places, rank, p.data_ptr(), q.data_ptr(), own.data_ptr(), kernels.ZEROS_AT)


def _array(matrices: Sequence[Place]) -> Any:
    return np.array(matrices, np.int64).reshape(-1, 3)


def _launches(x: Tensor, p: Tensor, q: Tensor, rank: int) -> bool:
    return not on_host(x) and not x.is_meta and rank <= LARGEST_RANK and triton_takes_fp32(x, p, q)
