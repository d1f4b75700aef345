"""Adam's momentum before compression (1-bit Adam: Tang et al., ICML 2021, arXiv 2102.02888)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.dense import Dense
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Compressor, Context, Exchange, Momentum, State, state_dtype


@dataclass(frozen=True)
class AdamMomentum(Wrapper):
    """Compress Adam's momentum in place of the gradient: m = the mean of beta m + (1 - beta) g.

    Adam divides by the root of a mean of squared gradients, and the error of a compressed gradient enters
    those squares. A momentum changes little from step to step, so its error is small, and the squares are not
    touched any more. That is from `freeze_step` on; before, gradients travel, by what `inner` is then.
    Attaching has Adam or AdamW keep its variance from there on, and take what travels as its momentum.

    State: `momentum`, m, equal on all ranks, of the tensor's shape, in fp32 where that is of two bytes.
    Before `freeze_step` it is the one that Adam has too.

    Attributes:
        beta: Adam's `betas[0]`, in (0, 1).
        freeze_step: attempts of the optimizer, 1 or more, in which gradients travel.
    """

    beta: float = 0.9
    freeze_step: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("beta", self.beta, "write Adam's betas[0], such as 0.9", above=0, below=1)
        hint = "it is how many steps of Adam find the variance: write a fifth of the training's steps"
        checks.whole("freeze_step", self.freeze_step, 1, None, hint)

    @property
    def takes_momentum(self) -> Momentum | None:
        """Its momentum, which replaces Adam's from `freeze_step` on."""
        return Momentum(self.beta, freeze_step=self.freeze_step)

    @property
    def changes(self) -> tuple[int, ...]:
        """Those of the inner compressor, and the step from which on a momentum is encoded."""
        return tuple(sorted({*self.inner.changes, self.freeze_step}))

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    @property
    def shows_nonfinite(self) -> bool:  # type: ignore[override]
        return self.inner.shows_nonfinite

    def exempted(self) -> Compressor:
        """Momentum around the inner compressor's choice, or around `Dense`."""
        return AdamMomentum(self.inner.exempted() or Dense(), self.beta, self.freeze_step)

    def is_shared(self, field: str) -> bool:
        """The momentum is; of other fields the inner compressor says."""
        return field == "momentum" or super().is_shared(field)

    def ended(self, steps: int) -> str:
        """That the variance was never frozen, so that gradients have travelled all the time."""
        if steps > self.freeze_step:
            return super().ended(steps)
        return (
            f"the training ended after {steps} steps, and freeze_step={self.freeze_step}: gradients have "
            "travelled all the time, and no momentum; write a fifth of the training's steps"
        )

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and a momentum of zeros."""
        momentum = torch.zeros_like(like, dtype=state_dtype(like.dtype))
        return {"momentum": momentum, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Run the inner exchange on the gradient, or on the momentum with the gradient in it."""
        kept, momentum = state["momentum"], ctx.spare("momentum", state["momentum"])
        frozen, given = ctx.step >= self.freeze_step, x
        if frozen:
            given = ctx.scratch("ahead", x, x.shape, x.dtype)
            self._move(kept, x, given if given.dtype == kept.dtype else momentum)
            if given.dtype != kept.dtype:
                given.copy_(momentum)
        done = yield from self.inner.exchange(given, inner_state(state, "inner"), ctx.inside("inner"))
        if frozen:
            momentum.copy_(done.mean)
        else:
            self._move(kept, done.mean, momentum)
        return done._replace(state={"momentum": momentum, **outer_state(done.state, "inner")})

    def _move(self, kept: Tensor, by: Tensor, out: Tensor) -> None:
        """Write beta `kept` + (1 - beta) `by` to `out`, of the type of `kept`."""
        if by.dtype != kept.dtype:
            by = out.copy_(by)
        torch.lerp(kept, by, 1 - self.beta, out=out)
