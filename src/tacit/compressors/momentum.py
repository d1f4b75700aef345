"""Momentum before compression (DGC: Lin, Han, Mao, Wang & Dally, ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.dense import Dense
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import (
    Compressor,
    Context,
    Difference,
    Exact,
    Exchange,
    Momentum,
    OneShot,
    Rounded,
    State,
    state_dtype,
)
from tacit.exchange.finite_checks import refuse_overflow


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Compress this rank's momentum in place of its gradient: u = m u + g; bytes are the inner compressor's.

    Put it around `ErrorFeedback`, whose residual then is the paper's v: v = v + u, of which some entries are
    sent. So what is not sent yet keeps its momentum. Attaching takes the momentum from the optimizer, which
    must be SGD. Parameters that the inner compressor exempts send u densely.

    State: `velocity`, u, rank-local, of the tensor's shape, in fp32 where that is of two bytes. u is stored
    as in torch's SGD; the authors' code stores m u if `nesterov` is set, with the same result. Weight decay
    stays with the optimizer; attaching gives it its momentum, as the authors' optimizer does.

    Attributes:
        momentum: m, in (0, 1).
        nesterov: give g + m u, as SGD's Nesterov momentum does.
        masking: set u to 0 where entries were sent (momentum factor masking), so that it does not carry on
            stale momentum; False: keep it.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "write SGD's, such as 0.9; for no momentum leave MomentumCorrection out"
        checks.real("momentum", self.momentum, hint, above=0, below=1)
        checks.flag("nesterov", self.nesterov)
        checks.flag("masking", self.masking)

    @property
    def takes_momentum(self) -> Momentum | None:
        """Its momentum, which replaces the optimizer's."""
        return Momentum(self.momentum, self.nesterov)

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    @property
    def shows_nonfinite(self) -> bool:  # type: ignore[override]
        return self.inner.shows_nonfinite

    def exempted(self) -> Compressor:
        """Momentum without masking around the inner compressor's choice, or around `Dense`."""
        return MomentumCorrection(Dense(), self.momentum, self.nesterov, masking=False)

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and a velocity of zeros."""
        velocity = like.new_zeros(like.shape, dtype=state_dtype(like.dtype))
        return {"velocity": velocity, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Update the velocity, run the inner exchange on it, and mask what was sent."""
        velocity = ctx.spare("velocity", state["velocity"])
        if not x.is_meta:
            torch.add(x, state["velocity"], alpha=self.momentum, out=velocity)
        given = velocity
        if self.nesterov or velocity.dtype != x.dtype:
            given = ctx.scratch("ahead", x, x.shape, x.dtype)
            if self.nesterov and not x.is_meta:
                torch.add(x, velocity, alpha=self.momentum, out=given)
            elif not self.nesterov:
                given.copy_(velocity)
        if isinstance(self.inner, OneShot) and self.inner.hides_nonfinite:  # error feedback looks itself
            refuse_overflow(given, ctx)
        done = yield from self.inner.exchange(given, inner_state(state, "inner"), ctx.inside("inner"))
        sent = done.sent
        if self.masking and not x.is_meta:
            if isinstance(sent, Exact | Rounded | Difference):  # these refer to u, which masking changes
                sent = Exact(sent.dense(x))
            sent.clear_(velocity)
        return done._replace(sent=sent, state={"velocity": velocity, **outer_state(done.state, "inner")})
