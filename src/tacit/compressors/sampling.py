"""Entries, or directions of matrices, drawn by their size (Wangni et al. 2018; ATOMO: Wang et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.topk import TopK
from tacit.contracts import Context, Decoded, Matrix, OneShot, Payload, Transmitted
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.payloads import expect_parts
from tacit.kernels.positions import pack_positions


def probabilities(sizes: Tensor, k: int) -> Tensor:
    """p_i = min(1, c |size_i|), with c such that they add up to k: of all with this sum the least variance.

    Wangni et al. 2018, algorithm 2, until nothing changes. `sizes` are float64; of fewer than k that are not
    zero each has probability 1.
    """
    sizes = sizes.abs()
    if int(sizes.count_nonzero()) <= k:
        return (sizes > 0).to(sizes.dtype)
    sizes = sizes / sizes.max()  # so that no sum of them overflows, or vanishes
    certain = torch.zeros_like(sizes, dtype=torch.bool)
    while True:
        p = torch.where(certain, 1.0, sizes * ((k - certain.sum()) / sizes[~certain].sum()))
        above = p >= 1
        if bool((above == certain).all()):
            return p
        certain = above


def drawn(p: Tensor, k: int, draw: float) -> Tensor:
    """`k` rising positions, each i with probability p_i: where their sum passes `draw` + 0, 1, ...

    One number draws all (systematic sampling), so that exactly k are drawn. Where the p_i add up to less than
    k, some that have probability 0 fill up.
    """
    steps = torch.arange(k, dtype=torch.float64, device=p.device)
    found = torch.searchsorted(p.cumsum(0), steps + draw, right=True)
    order = torch.arange(k, device=p.device)
    rising = torch.cummax(found - order, dim=0).values + order  # as rounding may find one twice
    return torch.minimum(rising, len(p) - k + order)


@dataclass(frozen=True)
class SampledEntries(OneShot):
    """Send k = ceil(ratio x n) entries, drawn by their magnitudes, as x / p: right in the mean; no residual.

    Of all choices of so many entries the one of least variance (Wangni, Wang, Liu & Zhang, NeurIPS 2018,
    arXiv 1710.09854). Bytes are those of `TopK`. Difference from the paper: exactly k are drawn, where its
    number is random: each entry with the same probability, by one number for all.

    Attributes:
        ratio: the share of the entries that is sent, in (0, 1].
    """

    ratio: float = 0.01

    additive: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True
    sliceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ratio.check(self.ratio)

    @property
    def _format(self) -> TopK:
        return TopK(ratio=self.ratio)

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(values, positions)."""
        numel, k = x.numel(), ratio.count(self.ratio, x.numel())
        packed = ctx.scratch("positions", x, (position_bytes(numel, k),), torch.uint8)
        if x.is_meta:
            return x.new_empty(k), packed
        if not bool(x.isfinite().all()):
            return x.new_full((k,), torch.nan), packed.zero_()
        p = probabilities(x.double(), k)
        index = drawn(
            p, k, float(torch.rand((), generator=ctx.rng("sampling", ctx.rank), dtype=torch.float64))
        )
        values = torch.where(p[index] > 0, x[index].double() / p[index], 0.0).to(x.dtype)
        pack_positions(index.int(), numel, k, packed)
        return values, packed

    def check(self, payload: Payload, out: Tensor) -> None:
        self._format.check(payload, out)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        self._format.decode_(payload, out)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        self._format.decode_add_(payload, out, weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)


@dataclass(frozen=True)
class SampledSpectrum(OneShot):
    """Send of each matrix `rank` of its singular directions, drawn by their size: right in the mean.

    ATOMO's spectral form (Wang et al., NeurIPS 2018, arXiv 1806.04090): M = sum_i s_i u_i v_i', of which
    direction i is kept with probability p_i = min(1, c s_i) and sent as s_i / p_i. Bytes: 4 x rank x
    (m + n + 1) a matrix, to P - 1 peers. A singular value decomposition of every matrix in every round:
    `PowerSGD` is much quicker. Difference from the paper: exactly `rank` are drawn, where its number is
    random; a matrix of no more than `rank` directions is sent in all of them.

    Attributes:
        rank: how many directions of a matrix travel; the paper's sparsity budget.
        matrices: where the matrices lie in the flat tensor; filled in when it is attached.
    """

    rank: int = 3
    matrices: tuple[Matrix, ...] = ()

    additive: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("rank", self.rank, 1, None, "1 to 3 are usual")
        checks.matrices(self.matrices)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> SampledSpectrum:
        return replace(self, matrices=matrices)

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """One tensor: of each matrix u of each direction, then v, with s / p in u."""
        draws = torch.rand(len(self.matrices), generator=ctx.rng("spectrum", ctx.rank), dtype=torch.float64)
        parts = []
        for m, draw in zip(self.matrices, draws.tolist(), strict=True):
            k = min(self.rank, m.rows, m.columns)
            matrix = x[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns)
            if x.is_meta or not bool(matrix.isfinite().all()):
                parts.append(torch.full_like(x, torch.nan)[: k * (m.rows + m.columns)])
                continue
            size = float(matrix.abs().max()) or 1.0
            u, s, v = torch.linalg.svd(matrix.double() / size, full_matrices=False)
            p = probabilities(s, k)
            index = drawn(p, k, draw)
            weights = torch.where(p[index] > 0, s[index] / p[index], 0.0)
            parts += [(u.T[index] * weights[:, None] * size).reshape(-1), v[index].reshape(-1)]
        return (torch.cat([part.to(x.dtype) for part in parts]) if parts else x.new_empty(0),)

    def check(self, payload: Payload, out: Tensor) -> None:
        sizes = [min(self.rank, m.rows, m.columns) * (m.rows + m.columns) for m in self.matrices]
        expect_parts(payload, out.numel(), ("directions", sum(sizes), out.dtype))

    def decode_(self, payload: Payload, out: Tensor) -> None:
        self.check(payload, out)
        self.decode_add_(payload, out.zero_(), 1.0)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        self.check(payload, out)
        (rest,) = payload
        for m in self.matrices:
            k = min(self.rank, m.rows, m.columns)
            u, v, rest = (
                rest[: k * m.rows],
                rest[k * m.rows :][: k * m.columns],
                rest[k * (m.rows + m.columns) :],
            )
            into = out[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns)
            into.addmm_(u.view(k, m.rows).T, v.view(k, m.columns), alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)
