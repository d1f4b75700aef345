"""Adam's momentum before compression (1-bit Adam: Tang et al., ICML 2021, arXiv 2102.02888)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.dense import Dense
from tacit.compressors.int8 import Int8
from tacit.compressors.scheduled import ByStep
from tacit.compressors.wrappers import ErrorFeedback, Wrapper, inner_state, outer_state, times
from tacit.contracts import (
    Compressor,
    Context,
    Exchange,
    Matrix,
    Momentum,
    ScheduleState,
    State,
    state_dtype,
)
from tacit.errors import ConfigError


@dataclass(frozen=True)
class AdamMomentum(ByStep, Wrapper):
    """Compress Adam's momentum in place of the gradient: m = the mean of beta m + (1 - beta) g.

    Adam divides by the root of a mean of squared gradients, its variance, and the error of a compressed
    gradient enters those squares. A momentum changes little from step to step, so its error is small. It is
    sent while the variance is kept; gradients are sent before, and while the variance is renewed. Attaching
    makes Adam or AdamW freeze its variance, and use the exchanged momentum.

    State: `momentum`, m, equal on all ranks, of the tensor's shape, in fp32 where that is of two bytes. While
    gradients travel it is the one that Adam has too. The state of `inner` and of `gradients` is one: a
    residual is in units of what travels, and one of gradients acts on a momentum by 1 - beta. The last
    momentum before gradients travel again is sent by `gradients`: so what signs have left out enters the
    momentum, and not the variance.

    Attributes:
        inner: compresses momenta.
        gradients: compresses gradients; has the same state fields as `inner`.
        beta: Adam's `betas[0]`, in (0, 1).
        freeze_step: the number of attempts of the optimizer, 1 or more, after which the variance is first
            kept.
        refresh: how many steps each renewal of the variance takes; see `Momentum.moving`. 0: no renewal.
    """

    gradients: Compressor = ErrorFeedback(Int8())
    beta: float = 0.9
    freeze_step: int = 500
    refresh: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.compressor("gradients", self.gradients)
        checks.real("beta", self.beta, "write Adam's betas[0], such as 0.9", above=0, below=1)
        hint = "it is how many steps of Adam find the variance: write a fifth of the training's steps"
        checks.whole("freeze_step", self.freeze_step, 1, None, hint)
        checks.whole("refresh", self.refresh, 0, None, "write 20, or 0 to keep the first variance")

    @property
    def takes_momentum(self) -> Momentum:
        """Its momentum, which replaces Adam's while the variance is kept."""
        return Momentum(self.beta, freeze_step=self.freeze_step, refresh=self.refresh)

    def _at(self, step: int) -> Compressor:
        keeps = self.takes_momentum.keeps_variance
        return self.inner if keeps(step) and keeps(step + 1) else self.gradients

    @property
    def _all(self) -> tuple[Compressor, Compressor]:
        return self.inner, self.gradients

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps from which on the other of both travels."""
        starts, stops = zip(*self.takes_momentum.moving, strict=True)
        return tuple(sorted({*stops} ^ {start - 1 for start in starts[1:]}))

    def exempted(self) -> Compressor:
        """Momentum around the inner compressor's choice, or around `Dense`, for gradients too."""
        chosen = self.inner.exempted() or Dense()
        return replace(self, inner=chosen, gradients=chosen)

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        inner, gradients = (each.for_model(matrices) for each in self._all)
        return replace(self, inner=inner, gradients=gradients)

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        inner, gradients = (each.for_training(schedule_state) for each in self._all)
        return replace(self, inner=inner, gradients=gradients)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        inner, gradients = (each.with_layout(matrices) for each in self._all)
        return replace(self, inner=inner, gradients=gradients)

    def is_shared(self, field: str) -> bool:
        """True for the momentum; for other fields as the inner compressor declares."""
        return field == "momentum" or super().is_shared(field)

    def ended(self, steps: int) -> str:
        """A warning if the variance was never frozen, so that only gradients were sent."""
        if steps > self.freeze_step:
            return super().ended(steps)
        return (
            f"the training ended after {steps} steps, and freeze_step={self.freeze_step}: gradients have "
            "travelled all the time, and no momentum; write a fifth of the training's steps"
        )

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and a momentum of zeros.

        Raises:
            ConfigError: `inner` and `gradients` differ in fields or shapes.
        """
        state = self.inner.init(like)
        other = self.gradients.init(like.new_empty(like.shape, device="meta"))
        if {name: x.shape for name, x in state.items()} != {name: x.shape for name, x in other.items()}:
            raise ConfigError(
                f"inner={self.inner} keeps {sorted(state)} and gradients={self.gradients} {sorted(other)}, "
                "or of other shapes: one takes over the state of the other, so give both the same wrappers"
            )
        momentum = torch.zeros_like(like, dtype=state_dtype(like.dtype))
        return {"momentum": momentum, **outer_state(state, "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Exchange the gradient, or the momentum with the gradient in it."""
        kept, momentum = state["momentum"], ctx.spare("momentum", state["momentum"])
        ahead = ctx.scratch("ahead", x, x.shape, x.dtype)
        keeps = self.takes_momentum.keeps_variance(ctx.step)
        given = ahead if keeps else x
        if keeps:
            self._move(kept, x, given if given.dtype == kept.dtype else momentum)
            if given.dtype != kept.dtype:
                given.copy_(momentum)
        if ctx.step and keeps != self.takes_momentum.keeps_variance(ctx.step - 1):
            by = 1 - self.beta if keeps else 1 / (1 - self.beta)
            ctx = replace(ctx, rescale=times(by, ctx.rescale, x.numel()))
        inner = self._at(ctx.step)
        done = yield from inner.exchange(given, inner_state(state, "inner"), ctx.inside("inner"))
        if keeps:
            momentum.copy_(done.mean)
        else:
            self._move(kept, done.mean, momentum)
        return done._replace(state={"momentum": momentum, **outer_state(done.state, "inner")})

    def _move(self, kept: Tensor, by: Tensor, out: Tensor) -> None:
        """Write beta `kept` + (1 - beta) `by` to `out`, of the type of `kept`."""
        if by.dtype != kept.dtype:
            by = out.copy_(by)
        torch.lerp(kept, by, 1 - self.beta, out=out)
