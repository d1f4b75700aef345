"""Entries chosen at random, the same on all ranks (Stich et al., NeurIPS 2018; Wangni et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.contracts import AllReduce, Compressor, Context, Exchange, Outcome, Sparse, State
from tacit.exchange.finite_checks import refuse_overflow
from tacit.kernels.dispatch import on_host
from tacit.kernels.philox import uniform


@dataclass(frozen=True)
class RandomK(Compressor):
    """Send k = ceil(ratio x n) random entries, as a dense all-reduce: 2 (P - 1) / P x k x b bytes.

    All ranks draw the same positions from the same seed, so none are sent, and payloads are additive. On a
    device they are drawn there, and are others than on the host: all ranks run on one or the other.
    Difference from the papers: positions are drawn one from each of k equal spans, not freely, which
    costs no permutation; each entry is still as likely as any other.

    Attributes:
        ratio: the share of the entries that is sent, in (0, 1].
        unbiased: multiply by 1 / ratio, for use without `ErrorFeedback`; with it this would diverge.
    """

    ratio: float = 0.01
    unbiased: bool = False

    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ratio.check(self.ratio)
        checks.flag("unbiased", self.unbiased)

    def init(self, like: Tensor) -> State:
        """No state; wrap it in `ErrorFeedback` to have a residual."""
        return {}

    def positions(self, x: Tensor, ctx: Context) -> Tensor:
        """k rising positions, equal on all peers, new in every round."""
        numel, k = x.numel(), ratio.count(self.ratio, x.numel())
        bounds = torch.arange(k + 1, device=x.device) * numel // k
        if on_host(x):
            drawn = torch.rand(k, generator=ctx.rng("randomk"), dtype=torch.float64)
        else:
            drawn = uniform(ctx.draw("randomk"), k, x.device)
        return bounds[:-1] + (drawn * (bounds[1:] - bounds[:-1])).long()

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Gather the entries, average them with the peers', and scatter the mean among zeros."""
        index = self.positions(x, ctx)
        values = x[index]
        if self.unbiased:
            values *= x.numel() / index.numel()
        refuse_overflow(values, ctx)
        sent = Sparse(index, values.clone())
        (mean,) = yield AllReduce((values,))
        ctx.out.zero_().index_copy_(0, index, mean)
        return Outcome(ctx.out, sent, state)
