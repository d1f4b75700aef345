"""Sketches that add up, and the entries that they show to be large (Sketched-SGD: Ivkin et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.contracts import AllReduce, Compressor, Context, Exchange, Outcome, Sparse, State
from tacit.exchange.finite_checks import refuse_overflow


@dataclass(frozen=True)
class CountSketch(Compressor):
    """Send a count sketch of the tensor, then the k = ceil(ratio x n) entries that its mean shows as largest.

    The paper's two rounds (arXiv 1903.04488): each rank's sketch is `rows` rows of ceil(width x n) sums, to
    one of which each entry is added with a random sign; sketches add up to the sketch of the sum. An entry is
    estimated by the median of its rows. Of the `candidates` x k that are largest by estimate each rank then
    sends its own values, and the k largest of their mean are the answer. Bytes, by two all-reduces:
    2 (P - 1) / P x 4 x (rows x ceil(width x n) + candidates x k), however many ranks there are.

    All ranks choose alike, so no positions travel, and what is chosen is large in the sum, not on one rank.
    Put `ErrorFeedback` around it. Differences from the paper: it keeps the residual as it is, not a momentum
    of its own (`MomentumCorrection` does); the hash is new in every round.

    Attributes:
        ratio: the share of the entries that arrive, in (0, 1].
        width: sums in a row, as a share of the entries.
        rows: an odd number; more make estimates safer.
        candidates: of so many times k entries the values are fetched; the paper's P.
    """

    ratio: float = 0.01
    width: float = 0.02
    rows: int = 5
    candidates: int = 4

    def __post_init__(self) -> None:
        ratio.check(self.ratio)
        ratio.check(self.width, "width")
        checks.whole("rows", self.rows, 1, 63, "write 5, or another odd number")
        checks.whole("candidates", self.candidates, 1, None, "write 4")

    def init(self, like: Tensor) -> State:
        """No state; wrap it in `ErrorFeedback` to have a residual."""
        return {}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Add up the sketches; choose by them, alike on all ranks; fetch what is chosen."""
        numel = x.numel()
        k, columns = ratio.count(self.ratio, numel), ratio.count(self.width, numel)
        wide = torch.promote_types(x.dtype, torch.float32)
        sketch = torch.zeros(self.rows, columns, dtype=wide, device=x.device)
        buckets, signs = self._hashes(numel, columns, ctx, x)
        if not x.is_meta:
            for row, at, sign in zip(sketch, buckets, signs, strict=True):
                row.index_add_(0, at, x.to(wide) * sign)
        refuse_overflow(sketch, ctx)
        yield AllReduce((sketch,))
        fetched = min(numel, k * self.candidates)
        index = torch.empty(fetched, dtype=torch.int64, device=x.device)
        if not x.is_meta:
            rows = [row[at] * sign for row, at, sign in zip(sketch, buckets, signs, strict=True)]
            estimates = torch.stack(rows).median(dim=0).values
            index = estimates.abs().topk(fetched).indices.sort().values
        own = x[index] if not x.is_meta else x.new_empty(fetched)
        (mean,) = yield AllReduce((own.clone(),))
        if not x.is_meta:
            kept = mean.abs().topk(k).indices
            index, own, mean = index[kept], own[kept], mean[kept]
        ctx.out.zero_().index_copy_(0, index, mean) if not x.is_meta else None
        return Outcome(ctx.out, Sparse(index, own), state)

    def _hashes(self, numel: int, columns: int, ctx: Context, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """For each row to which sum each entry goes, and with which sign; equal on all ranks."""
        if x.is_meta:
            return [], []
        draw = ctx.rng("sketch")
        buckets = [torch.randint(columns, (numel,), generator=draw) for _ in range(self.rows)]
        signs = [torch.randint(2, (numel,), generator=draw).mul_(2).sub_(1) for _ in buckets]
        return buckets, signs
