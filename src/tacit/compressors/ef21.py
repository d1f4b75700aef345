"""Differences to what the peers already know of a rank's gradient (EF21: Richtarik, Sokolov & Fatkhullin)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.compressors.lag import HeldGradient
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Compressor, Context, Exchange, OneShotUse, State, state_dtype
from tacit.exchange.finite_checks import refuse_overflow


@dataclass(frozen=True)
class EF21(Wrapper):
    """Send the compressed difference to the last estimate of this rank's gradient, and keep both up to date.

        c_r <- C(x_r - g_r);    g_r <- g_r + c_r;    answer <- answer + mean_r(c_r)       = mean_r(g_r)

    Richtarik, Sokolov & Fatkhullin, NeurIPS 2021 (arXiv 2106.05203). An estimate that lags is caught up with,
    and nothing is added twice, where `ErrorFeedback` sends later all that was left out. Bytes are those of
    C. Put `MomentumCorrection(..., masking=False)` around it for EF21-SGDM.

    State: `known`, g_r, rank-local; `answer`, the mean of all g_r, equal on all ranks; both in fp32 where the
    tensor is of two bytes.
    """

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    def one_shot(self, step: int) -> OneShotUse | None:
        """That of the inner compressor, for differences: a payload is useless without the estimates."""
        one_shot = self.inner.one_shot(step)
        return one_shot and one_shot._replace(is_predicted=True)

    def exempted(self) -> Compressor | None:
        """That of the inner compressor, without estimates."""
        return self.inner.exempted()

    def is_shared(self, field: str) -> bool:
        return field == "answer" or super().is_shared(field)

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and estimates of zero."""
        kept = {name: torch.zeros_like(like, dtype=state_dtype(like.dtype)) for name in ("known", "answer")}
        return {**kept, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Run the inner exchange on the difference, and add what came to both estimates."""
        known, answer = (ctx.spare(name, state[name]) for name in ("known", "answer"))
        apart, rest = (ctx.scratch(name, x, x.shape, x.dtype) for name in ("apart", "rest"))
        apart.copy_(torch.sub(x, state["known"], out=known))
        if self.inner.hides_nonfinite:
            refuse_overflow(apart, ctx)
        done = yield from self.inner.exchange(apart, inner_state(state, "inner"), ctx.inside("inner"))
        done.sent.subtract_from_(rest.copy_(apart))
        torch.add(state["known"], apart, out=known).sub_(rest)
        torch.add(state["answer"], done.mean, out=answer)
        refuse_overflow(answer, ctx)
        ctx.out.copy_(answer)
        after = {"known": known, "answer": answer, **outer_state(done.state, "inner")}
        return done._replace(mean=ctx.out, finite=False, sent=HeldGradient(known), state=after)
