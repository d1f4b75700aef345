"""What a rank contributed to a round, as its peers decoded it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.contracts.common import Factors


class Transmitted(ABC):
    """What this rank contributed to a round, as its peers decoded it."""

    @abstractmethod
    def subtract_from_(self, new_residual: Tensor) -> None:
        """Subtract the contribution from `new_residual` (flat, the tensor that was to be sent), in place."""

    @abstractmethod
    def dense(self, like: Tensor) -> Tensor:
        """The contribution as a new tensor of the shape and type of `like`; for tests and diagnostics."""

    def clear_(self, x: Tensor) -> None:
        """Set `x` (flat) to zero at the entries that were sent: those that are not zero, or were chosen."""
        x.masked_fill_(self.dense(x).ne(0), 0.0)


_PIECE = 1 << 14
"""Entries copied at a time, so that no whole copy is allocated: 64 KiB of fp32."""


@dataclass(frozen=True, slots=True)
class Exact(Transmitted):
    """All of `x` was sent without error."""

    x: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        """No error remains."""
        new_residual.zero_()

    def dense(self, like: Tensor) -> Tensor:
        """A copy of `x`, of the shape of `like`."""
        return self.x.clone().view_as(like)


@dataclass(frozen=True, slots=True)
class Rounded(Transmitted):
    """`x` was sent, rounded to `dtype`."""

    x: Tensor
    dtype: torch.dtype

    def subtract_from_(self, new_residual: Tensor) -> None:
        """The rounding error remains."""
        step = _PIECE if new_residual.is_cpu else max(1, new_residual.numel())
        for start in range(0, new_residual.numel(), step):
            piece = slice(start, start + step)
            new_residual[piece] -= self.x[piece].to(self.dtype).to(new_residual.dtype)

    def dense(self, like: Tensor) -> Tensor:
        """`x` after a round trip through `dtype`."""
        return self.x.to(self.dtype).to(like.dtype).view_as(like)


@dataclass(frozen=True, slots=True)
class Sparse(Transmitted):
    """The entries `values` at the flat positions `index` were sent without error; no position twice."""

    index: Tensor
    values: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        """All other entries remain."""
        new_residual.index_add_(0, self.index, self.values, alpha=-1)

    def clear_(self, x: Tensor) -> None:
        """Set the sent entries of `x` to zero."""
        x.index_fill_(0, self.index.long(), 0.0)

    def dense(self, like: Tensor) -> Tensor:
        """The sent entries, among zeros."""
        return torch.zeros_like(like).index_add_(0, self.index, self.values)


@dataclass(frozen=True, slots=True)
class Difference(Transmitted):
    """The input `x` plus the residual `before`, less the residual `after`.

    Attributes:
        factors: what `before` was multiplied by before it was added.
    """

    x: Tensor
    before: Tensor
    after: Tensor
    factors: Factors = ()

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Subtract `x` and `before`, and add `after`."""
        new_residual.sub_(self.x).sub_(self._before()).add_(self.after)

    def dense(self, like: Tensor) -> Tensor:
        """The difference, of the type of `like`."""
        return (self.x + self._before() - self.after).to(like.dtype)

    def _before(self) -> Tensor:
        if not self.factors:
            return self.before
        return add_rescaled(None, self.before, self.factors, torch.empty_like(self.before))


def add_rescaled(x: Tensor | None, residual: Tensor, factors: Factors, out: Tensor) -> Tensor:
    """Write `x` plus `residual` times `factors` to `out`, and return it; `x` None: without `x`."""
    if not factors and x is not None and x.dtype == out.dtype:
        return torch.add(x, residual, out=out)
    out.copy_(residual)
    for start, stop, factor in factors:
        out[start:stop].mul_(factor)
    return out if x is None else out.add_(x)
