"""Low-rank matrices (PowerSGD: Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    AllReduce,
    Compressor,
    Context,
    Exchange,
    Matrix,
    Outcome,
    Request,
    State,
    Transmitted,
)
from tacit.exchange.finite_checks import largest
from tacit.kernels import products
from tacit.kernels.dispatch import on_host
from tacit.kernels.orthogonal import orthogonalize_, scale_
from tacit.torch_compat import add_each_, copy_each_, zero_each_


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape at equal distances.

    Attributes:
        first: where the first one begins in x, its P in p and its Q in q.
        step: how far it is to the next, in each.
    """

    shape: tuple[int, int]
    first: tuple[int, int, int]
    step: tuple[int, int, int] = (0, 0, 0)
    count: int = 1

    def and_at(self, place: tuple[int, int, int]) -> _Batch | None:
        """This batch with one more matrix; None if that is not at the next position."""
        x, p, q = (at - first for at, first in zip(place, self.first, strict=True))
        step = (x, p, q) if self.count == 1 else self.step
        if tuple(self.count * each for each in step) != (x, p, q):
            return None
        return replace(self, step=step, count=self.count + 1)


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """One step of power iteration: M is sent as P Q', of `rank` columns: 2 (P - 1) / P x r (m + n) b bytes.

    The paper's algorithm 1, for a matrix M with Q of the round before (warm start):

        P <- M Q;  P <- mean(P);  P <- orthogonal(P);  Q <- M' P;  Q <- mean(Q);  result P Q'

    State: `q`, equal on all ranks. What a rank has contributed is P P' M, its own part of the mean; under
    `ErrorFeedback` the rest of M is the residual. Differences from the paper: none known; torch's hook takes
    the difference to the mean instead, and aborts on Gloo where DDP has more than one bucket.

    Attributes:
        rank: columns of P and Q. More send more and follow the gradient more closely; short trainings need
            more of them, as what is late has less time to arrive (docs/accuracy.md).
        min_compression_rate: a matrix is left dense unless this many times fewer numbers would travel.
        matrices: where the matrices lie in the flat tensor; filled in when it is attached.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    matrices: tuple[Matrix, ...] = ()

    adds_residual: ClassVar[bool] = True
    shared: ClassVar[frozenset[str]] = frozenset({"q"})
    hides_nonfinite: ClassVar[bool] = False
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("rank", self.rank, 1, None, "1 to 4 are usual")
        checks.real("min_compression_rate", self.min_compression_rate, "2 is usual", above=0)
        checks.matrices(self.matrices)

    def exempts(self, shape: torch.Size) -> bool:
        """Vectors, and matrices for which the rank saves too little."""
        if len(shape) < 2:
            return True
        rows, columns = shape[0], shape[1:].numel()
        return (rows + columns) * self.rank * self.min_compression_rate > rows * columns

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same with these as `matrices`."""
        return replace(self, matrices=matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """`q` has columns x rank elements for each matrix."""
        return tuple(m.columns * self.rank for m in self.matrices)

    def init(self, like: Tensor) -> State:
        """Q at random, equal on all ranks."""
        q = torch.empty(
            sum(m.columns for m in self.matrices) * self.rank, dtype=like.dtype, device=like.device
        )
        if not like.is_meta:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
            q.copy_(torch.randn(q.numel(), generator=generator, dtype=torch.float32))
        return {"q": q}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Two all-reduces: one of all P, one of all Q."""
        return (yield from self._exchange(x, None, None, state, ctx))

    def exchange_with_feedback(
        self, x: Tensor, residual: Tensor, new_residual: Tensor, state: State, ctx: Context
    ) -> Exchange:
        """See `Compressor`; both are taken where the matrices are read anyway."""
        return (yield from self._exchange(x, residual, new_residual, state, ctx))

    def _exchange(
        self, x: Tensor, residual: Tensor | None, new_residual: Tensor | None, state: State, ctx: Context
    ) -> Exchange:
        p = ctx.scratch("p", x, (sum(m.rows for m in self.matrices) * self.rank,), x.dtype)
        q, own = ctx.spare("q", state["q"]), ctx.scratch("own", x, state["q"].shape, x.dtype)
        own.copy_(state["q"])
        # P is then as large as M: gradients of 1e20 do not overflow in it, nor do those of 1e-20 vanish.
        scale_(own, [m.columns for m in self.matrices], self.rank)
        if x.is_meta:
            products.prepare()
        given = self._times_q_(x, residual, new_residual, p, own)
        yield from self._average_(p, None, "p", ctx)
        orthogonalize_(p, [m.rows for m in self.matrices], self.rank)
        if not products.times_p_(given, p, q, self._places, self.rank):
            for matrices, bases, mine in self._parts(given, p, q):
                torch.bmm(bases, matrices, out=mine)
        yield from self._average_(q, own, "q", ctx)
        zero_each_([ctx.out[start:stop] for start, stop in self._gaps(x.numel())])
        sent = _Projected(self, p, own)
        if new_residual is None:
            self._expand_(ctx.out, p, q)
        elif not products.expand_and_subtract_(ctx.out, new_residual, p, q, own, self._places, self.rank):
            self._expand_(ctx.out, p, q)
            sent.subtract_from_(new_residual)
        return Outcome(ctx.out, sent, {"q": q}, self._bounded(p, q))

    def _times_q_(
        self, x: Tensor, residual: Tensor | None, new_residual: Tensor | None, p: Tensor, q: Tensor
    ) -> Tensor:
        """P = M Q; M, which with a residual is its sum with `x`, written to `new_residual`."""
        if residual is not None and new_residual is not None:
            if products.times_q_(x, p, q, self._places, self.rank, residual, new_residual):
                gaps = [slice(*gap) for gap in self._gaps(x.numel())]
                sums = [new_residual[gap] for gap in gaps]
                copy_each_(sums, [x[gap] for gap in gaps])
                if sums:
                    add_each_(sums, [residual[gap] for gap in gaps])
                return new_residual
            x = new_residual if x.is_meta else torch.add(x, residual, out=new_residual)
        if not products.times_q_(x, p, q, self._places, self.rank):
            for matrices, mine, before in self._parts(x, p, q):
                torch.bmm(before, matrices.transpose(1, 2), out=mine)
        return x

    def _expand_(self, x: Tensor, p: Tensor, q: Tensor) -> None:
        """Overwrite the matrices in x by P Q'."""
        if not products.expand_(x, p, q, self._places, self.rank):
            for matrices, bases, mine in self._parts(x, p, q):
                torch.bmm(bases.transpose(1, 2), mine, out=matrices)

    def _average_(
        self, factor: Tensor, seen: Tensor | None, which: str, ctx: Context
    ) -> Generator[Request, Any, None]:
        """Overwrite the factors by the peers' mean, and `seen` by what the peers saw of this rank's."""
        if seen is not None:
            seen.copy_(factor)
        yield AllReduce((factor,))

    def _bounded(self, p: Tensor, q: Tensor) -> bool:
        """Whether P and Q show that no entry of P Q' is infinite; False where the host would have to wait."""
        if p.is_meta or not on_host(p):
            return False
        return self.rank * largest(p) * largest(q) < torch.finfo(p.dtype).max / 2

    def _parts(self, x: Tensor, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views, batch by batch: M (count, rows, columns), P' (count, rank, rows), Q' (count, rank, columns).

        P and Q lie in memory by columns: products with them then read M in one stream, in half the time.
        """
        for batch in () if x.is_meta else self._batches:
            rows, columns = batch.shape
            yield (
                _strided(x, batch, 0, rows, columns),
                _strided(p, batch, 1, self.rank, rows),
                _strided(q, batch, 2, self.rank, columns),
            )

    @cached_property
    def _places(self) -> tuple[products.Place, ...]:
        return tuple((m.start, m.rows, m.columns) for m in self.matrices)

    @cached_property
    def _batches(self) -> tuple[_Batch, ...]:
        """The matrices, batched if they lie at equal distances: one call multiplies a batch, in place.

        Others are not copied into batches: that would take longer than the calls.
        """
        open_: dict[tuple[int, int], _Batch] = {}
        done: list[_Batch] = []
        at_p = at_q = 0
        for m in self.matrices:
            shape, place = (m.rows, m.columns), (m.start, at_p, at_q)
            longer = open_[shape].and_at(place) if shape in open_ else None
            if longer is None and shape in open_:
                done.append(open_[shape])
            open_[shape] = longer or _Batch(shape, place)
            at_p, at_q = at_p + m.rows * self.rank, at_q + m.columns * self.rank
        return (*done, *open_.values())

    def _gaps(self, numel: int) -> Iterator[tuple[int, int]]:
        """The spans between and after the matrices."""
        at = 0
        for m in self.matrices:
            if m.start > at:
                yield at, m.start
            at = m.start + m.rows * m.columns
        if at < numel:
            yield at, numel


@dataclass(frozen=True)
class _Projected(Transmitted):
    """This rank's contribution: P (M' P)'."""

    codec: PowerSGD
    p: Tensor
    q: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        codec = self.codec
        if not products.expand_(new_residual, self.p, self.q, codec._places, codec.rank, subtract=True):
            for matrices, bases, own in codec._parts(new_residual, self.p, self.q):
                matrices.baddbmm_(bases.transpose(1, 2), own, alpha=-1)

    def dense(self, like: Tensor) -> Tensor:
        whole = torch.zeros_like(like)
        self.codec._expand_(whole, self.p, self.q)
        return whole


def _strided(x: Tensor, batch: _Batch, which: int, height: int, width: int) -> Tensor:
    size, strides = (batch.count, height, width), (batch.step[which], width, 1)
    return x.as_strided(size, strides, x.storage_offset() + batch.first[which])
