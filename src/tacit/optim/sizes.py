"""Norms of parameters, and steps scaled by them: numbers stay on the device, so the host never waits."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.dispatch import on_host


def norm(x: Tensor) -> Tensor:
    """The Euclidean norm: one number of float64."""
    size: Tensor = x.norm() if on_host(x) else torch.linalg.vector_norm(x, dtype=_wide(x))
    return size.double()


def unless_zero(quotient: Tensor, *sizes: Tensor) -> Tensor:
    """The quotient; 1 where one of `sizes` is 0."""
    for size in sizes:
        quotient = torch.where(size != 0, quotient, 1.0)
    return quotient


def add_(x: Tensor, y: Tensor, factor: float | Tensor) -> None:
    """Add `factor` times `y` to `x`, in place."""
    if isinstance(factor, Tensor) and not on_host(x):
        x.add_(y.to(_wide(x)) * factor.to(_wide(x)))
    else:
        x.add_(y, alpha=float(factor))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
