"""Low-rank matrices (PowerSGD: Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Compressor, Context, Exchange, Matrix, Mean, Outcome, Sent, State
from tacit.errors import ConfigError


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """One step of power iteration: M is sent as P Q', of `rank` columns: 2 (P - 1) / P x r (m + n) b bytes.

    The paper's algorithm 1, for a matrix M with Q of the round before (warm start):

        P <- M Q;  P <- mean(P);  P <- orthogonal(P);  Q <- M' P;  Q <- mean(Q);  result P Q'

    State: `q`, equal on all ranks. What a rank has contributed is P P' M, its own part of the mean; under
    `ErrorFeedback` the rest is owed. Differences from the paper: none known; torch's own hook owes the
    difference to the mean instead, and aborts on Gloo where DDP has more than one bucket.

    Attributes:
        rank: columns of P and Q. More send more and follow the gradient more closely.
        min_compression_rate: a matrix is left dense unless this many times fewer numbers would travel.
        matrices: where the matrices lie in the flat tensor; filled in when it is attached.
    """

    rank: int = 2
    min_compression_rate: float = 2.0
    matrices: tuple[Matrix, ...] = ()

    shared: ClassVar[frozenset[str]] = frozenset({"q"})
    swallows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank} is not possible: write 1 or more, 1 to 4 are usual")
        if self.min_compression_rate <= 0:
            raise ConfigError(f"min_compression_rate={self.min_compression_rate} is not above 0: 2 is usual")

    def exempts(self, shape: torch.Size) -> bool:
        """Vectors, and matrices that would hardly shrink."""
        if len(shape) < 2:
            return True
        rows, columns = shape[0], shape[1:].numel()
        return (rows + columns) * self.rank * self.min_compression_rate > rows * columns

    def bound(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same for these matrices."""
        return replace(self, matrices=matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """Each matrix has its own Q."""
        return tuple(m.columns * self.rank for m in self.matrices)

    def init(self, like: Tensor) -> State:
        """Q at random, the same on all ranks."""
        q = torch.empty(
            sum(m.columns for m in self.matrices) * self.rank, dtype=like.dtype, device=like.device
        )
        if not like.is_meta:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
            q.copy_(torch.randn(q.numel(), generator=generator))
        return {"q": q}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Two means: of all P in one message, of all Q in another."""
        p = ctx.scratch("p", x, (sum(m.rows for m in self.matrices) * self.rank,), x.dtype)
        q = ctx.spare("q", state["q"])
        for matrix, mine, before in self._parts(x, p, state["q"]):
            torch.mm(before, matrix.t(), out=mine)
        yield Mean((p,))
        for matrix, basis, mine in self._parts(x, p, q):
            orthogonalize_(basis)
            torch.mm(basis, matrix, out=mine)
        own = ctx.scratch("own", x, q.shape, x.dtype)
        own.copy_(q)
        yield Mean((q,))
        for start, stop in self._gaps(x.numel()):
            ctx.out[start:stop] = 0
        for matrix, basis, agreed in self._parts(ctx.out, p, q):
            torch.mm(basis.t(), agreed, out=matrix)
        return Outcome(ctx.out, _Projected(self, p, own), {"q": q})

    def _parts(self, x: Tensor, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views, matrix by matrix: M (rows, columns), P' (rank, rows), Q' (rank, columns).

        P and Q lie in memory by columns: products with them then read M in one stream, in half the time.
        """
        at_p = at_q = 0
        for m in self.matrices:
            matrix = x[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns)
            end_p, end_q = at_p + m.rows * self.rank, at_q + m.columns * self.rank
            yield matrix, p[at_p:end_p].view(self.rank, m.rows), q[at_q:end_q].view(self.rank, m.columns)
            at_p, at_q = end_p, end_q

    def _gaps(self, numel: int) -> Iterator[tuple[int, int]]:
        """Where no matrix lies, between and behind the matrices."""
        at = 0
        for m in self.matrices:
            if m.start > at:
                yield at, m.start
            at = m.start + m.rows * m.columns
        if at < numel:
            yield at, numel


@dataclass(frozen=True)
class _Projected(Sent):
    """P (M' P)' of this rank's own M."""

    codec: PowerSGD
    p: Tensor
    q: Tensor

    def take_from_(self, owed: Tensor) -> None:
        for matrix, basis, own in self.codec._parts(owed, self.p, self.q):
            matrix.addmm_(basis.t(), own, alpha=-1)

    def dense(self, like: Tensor) -> Tensor:
        whole = torch.zeros_like(like)
        for matrix, basis, own in self.codec._parts(whole, self.p, self.q):
            torch.mm(basis.t(), own, out=matrix)
        return whole


def orthogonalize_(basis: Tensor) -> None:
    """Gram-Schmidt on the rows, in place. A row that depends on those before it becomes zero."""
    if basis.is_meta:
        return
    for i, row in enumerate(basis):
        norm = rest = torch.linalg.vector_norm(row)
        # Twice is enough: the second pass removes what rounding left in the first.
        for _ in range(2 if i else 0):
            row.addmv_(basis[:i].t(), basis[:i] @ row, alpha=-1)
            rest = torch.linalg.vector_norm(row)
        row.mul_(torch.where(rest > 1e-6 * norm, 1 / rest, 0))
