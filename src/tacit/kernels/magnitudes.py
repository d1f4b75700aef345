"""The largest magnitude of a tensor on the host, alone or while it is divided; and bf16, to and fro.

A largest magnitude is finite if all entries are: it takes one pass, in which a division costs nothing more.
torch needs two to four times as long for the arithmetic of bf16. Numba is not loaded for a magnitude alone:
that is 130 MB and a second of a process, which a session that compresses nothing does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.dispatch import kernel


@kernel("x", numba=(torch.float32, torch.bfloat16), triton=(), loads_numba=False)
def largest(x: Tensor) -> float:
    """The largest magnitude: NaN or infinite where one is, 0 of nothing."""
    return 0.0


@kernel("x", numba=(torch.float32, torch.bfloat16), triton=(), loads_numba=False)
def divide_(x: Tensor, by: float) -> float:
    """Divide the flat `x` in place. Returns a number that is finite if all quotients are, and else is not."""
    return 0.0


@kernel("x", triton=())
def round_to_(x: Tensor, out: Tensor) -> None:
    """Write the flat `x` to `out`, whose type is shorter: rounded to the nearest, halfway to the even one."""


@kernel("x", numba=(torch.bfloat16,), triton=())
def widen_(x: Tensor, out: Tensor) -> None:
    """Write the flat `x` to `out`, whose type is longer."""
