"""Orthonormal steps of low rank, by momentum that each rank keeps (Dion: Ahn, Xu, Abreu & Langford 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.powersgd import PowerSGD
from tacit.contracts import AllReduce, Context, Exchange, Outcome, State, Transmitted
from tacit.kernels.orthogonal import orthogonalize_, scale_


@dataclass(frozen=True)
class Dion(PowerSGD):
    """The answer is an orthonormal step in place of the mean; bytes are those of `PowerSGD` of this rank.

    For a matrix B of m x n, which is momentum plus gradient, with Q of the round before (arXiv 2504.05295):

        P <- orthogonal(mean(B Q));  R <- mean(B' P);  Q <- the columns of R, each of norm 1
        answer sqrt(m / n) P Q';  sent (1 - momentum) P R'

    Put `ErrorFeedback(..., rescale=False)` around it: its residual is the momentum, M = B - (1 - momentum)
    P R', rank by rank, as in the authors' compressed data-parallel form. State: `q`, equal on all ranks.

    Attributes:
        momentum: the share of the direction P R' that is kept after a step along it, in [0, 1).
    """

    momentum: float = 0.95

    adds_residual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("momentum", self.momentum, "write 0.95, as its authors do", least=0, below=1)

    def exempts(self, shape: torch.Size) -> bool:
        """Vectors: a matrix takes an orthonormal step, however small it is."""
        return len(shape) < 2

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Two all-reduces: one of all P, one of all R."""
        p = ctx.scratch("p", x, (sum(m.rows for m in self.matrices) * self.rank,), x.dtype)
        r, before = (ctx.scratch(key, x, state["q"].shape, x.dtype) for key in ("r", "before"))
        q = ctx.spare("q", state["q"])
        before.copy_(state["q"])
        scale_(before, [m.columns for m in self.matrices], self.rank)
        self._times_q_(x, None, None, p, before)
        yield AllReduce((p,))
        orthogonalize_(p, [m.rows for m in self.matrices], self.rank)
        for matrices, bases, mine in self._parts(x, p, r):
            torch.bmm(bases, matrices, out=mine)
        yield AllReduce((r,))
        self._normalize_(r, state["q"], q)
        for start, stop in self._gaps(x.numel()):
            ctx.out[start:stop] = 0
        sent = _Stepped(self, p, r)
        self._expand_(ctx.out, p, q)
        return Outcome(ctx.out, sent, {"q": q})

    def _normalize_(self, r: Tensor, before: Tensor, q: Tensor) -> None:
        """Q of sqrt(m / n) times the columns of R, at norm 1; a column of zeros stays what it was.

        The factor makes P Q' the answer, and does not change what P becomes in the next round.
        """
        at = 0
        for m in () if r.is_meta else self.matrices:
            here = slice(at, at + m.columns * self.rank)
            columns = r[here].view(self.rank, m.columns)
            largest = columns.abs().amax(dim=1, keepdim=True)
            unit = columns / largest
            unit *= math.sqrt(m.rows / m.columns) / unit.norm(dim=1, keepdim=True)
            q[here] = torch.where(largest == 0, before[here].view_as(unit), unit).view(-1)
            at = here.stop


@dataclass(frozen=True)
class _Stepped(Transmitted):
    """What leaves the momentum of every rank: (1 - momentum) P R'."""

    codec: Dion
    p: Tensor
    r: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        for matrices, bases, mine in self.codec._parts(new_residual, self.p, self.r):
            matrices.baddbmm_(bases.transpose(1, 2), mine, alpha=self.codec.momentum - 1)

    def dense(self, like: Tensor) -> Tensor:
        whole = torch.zeros_like(like)
        self.subtract_from_(whole)
        return whole.neg_()
