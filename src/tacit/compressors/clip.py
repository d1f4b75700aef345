"""Gradient clipping on each rank, before anything is compressed (DGC: Lin et al., ICLR 2018, section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Context, Exchange, State, Transmitted
from tacit.kernels.dispatch import on_host


@dataclass(frozen=True)
class Clip(Wrapper):
    """Scale this rank's tensor down to a largest norm, then compress it; bytes and state are the inner's.

    Each of P ranks clips its tensor to the norm `max_norm` * sqrt(share * P), where share is the part
    of the model's elements that travels in it: the squares of the limits of all buckets add up to
    `max_norm`^2 P, and P independent gradients of that length have a mean of length `max_norm`. Put it
    around `ErrorFeedback`, not inside, where all that is cut off would stay in the residual. Parameters that
    the inner compressor exempts are sent dense, unclipped. A tensor that is not finite is left as it is.

    The paper's limit is `max_norm` / sqrt(P), of gradients that are divided by P before they are clipped;
    here the mean divides afterwards. Difference from the paper: the norm is that of the tensors which
    travel together, not the whole model's.

    Attributes:
        max_norm: for the L2 norm of the whole model's mean gradient. Smaller clips more.
    """

    max_norm: float

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "it is the length to clip to; write 1.0, or leave Clip out not to clip"
        checks.real("max_norm", self.max_norm, hint, above=0)

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    def init(self, like: Tensor) -> State:
        return outer_state(self.inner.init(like), "inner")

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Scale `x` down if its norm is too large, then run the inner exchange."""
        # Where x may be overwritten, no buffer is needed; else a dry run must allocate one.
        short = x if x is ctx.out else ctx.scratch("short", x, x.shape, x.dtype)
        given, cut = _shortened(x, self.max_norm * math.sqrt(ctx.share * ctx.peers), short)
        done = yield from self.inner.exchange(given, inner_state(state, "inner"), ctx.inside("inner"))
        sent = _Shortened(done.sent) if cut else done.sent
        return done._replace(sent=sent, state=outer_state(done.state, "inner"))


@dataclass(frozen=True)
class _Shortened(Transmitted):
    """The contribution of a tensor that was scaled down; the rest stays in the residual."""

    inner: Transmitted

    def subtract_from_(self, new_residual: Tensor) -> None:
        new_residual.sub_(self.inner.dense(new_residual))

    def dense(self, like: Tensor) -> Tensor:
        return self.inner.dense(like)


def _shortened(x: Tensor, limit: float, short: Tensor) -> tuple[Tensor, bool]:
    """`x`, or in `short` a copy scaled to a norm of at most `limit`; and whether it may be scaled."""
    if not x.is_meta and not on_host(x):
        return _shortened_unseen(x, limit, short), True
    scale = _scale(x, limit)
    return (x, False) if scale == 1.0 else (torch.mul(x, scale, out=short), True)


def _shortened_unseen(x: Tensor, limit: float, short: Tensor) -> Tensor:
    """The same on a device: the factor stays there as a tensor, and both norms are computed."""
    kind = torch.promote_types(x.dtype, torch.float32)
    norm, wide = (torch.linalg.vector_norm(x, dtype=each).double() for each in (kind, torch.float64))
    norm = torch.where(norm.isfinite(), norm, wide)
    quotient = torch.full_like(norm, limit) / norm  # torch's `limit / norm` is not rounded correctly
    scale = torch.where((norm > limit) & norm.isfinite(), quotient, 1.0)
    return torch.mul(x.to(kind), scale.to(kind), out=short)


def _scale(x: Tensor, limit: float) -> float:
    """What to multiply `x` by so that its norm is at most `limit`; 1 where it is, or is not finite."""
    if x.is_meta:
        return 1.0
    norm = float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)))
    if not math.isfinite(norm):
        # Squares overflow long before entries do: only then is the slow sum in a wider type needed.
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return limit / norm if limit < norm < math.inf else 1.0
