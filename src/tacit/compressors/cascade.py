"""Two compressors in sequence: the second compresses the error of the first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.wrappers import inner_state, outer_state
from tacit.contracts import Compressor, Context, Exchange, Matrix, Outcome, State, Transmitted
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import refuse_overflow


@dataclass(frozen=True)
class Cascade(Compressor):
    """Compress by `first`, then compress its error by `second`; the two means add up.

    Bytes are the sum of both. `Cascade(PowerSGD(), TopK())` sends the few entries that a low rank misses most
    (as the low-rank and sparse parts of a matrix: Candes et al., JACM 2011). Put `ErrorFeedback` around it,
    not inside: there is then one residual for both.
    """

    first: Compressor
    second: Compressor

    def __post_init__(self) -> None:
        checks.compressor("first", self.first)
        checks.compressor("second", self.second)
        for part in (self.first, self.second):
            if part.takes_momentum is not None:
                raise ConfigError(
                    f"{part} applies momentum, here to a part of the gradient only: put "
                    "MomentumCorrection around Cascade"
                )

    @property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """Whether either one does."""
        return self.first.hides_nonfinite or self.second.hides_nonfinite

    @property
    def on_device(self) -> bool:
        return self.first.on_device and self.second.on_device

    @property
    def changes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.first.changes, *self.second.changes}))

    def exempts(self, shape: torch.Size) -> bool:
        return self.first.exempts(shape) or self.second.exempts(shape)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        return replace(self, first=self.first.with_layout(matrices), second=self.second.with_layout(matrices))

    def is_shared(self, field: str) -> bool:
        part, _, short = field.partition(".")
        return (self.first if part == "first" else self.second).is_shared(short)

    def widths(self, field: str) -> tuple[int, ...] | None:
        part, _, short = field.partition(".")
        return (self.first if part == "first" else self.second).widths(short)

    def init(self, like: Tensor) -> State:
        """The states of both, as "first." and "second." fields."""
        states = {"first": self.first.init(like), "second": self.second.init(like)}
        return {k: v for part, state in states.items() for k, v in outer_state(state, part).items()}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Two exchanges in sequence; the second is of what `first` did not send."""
        mean, rest = (ctx.scratch(key, x, x.shape, x.dtype) for key in ("mean", "rest"))
        inside = ctx.inside("first", out=mean)
        one = yield from self.first.exchange(x, inner_state(state, "first"), inside)
        if self.second.hides_nonfinite and not self.first.hides_nonfinite:
            refuse_overflow(one.mean, ctx)  # later only the sum is checked
        rest.copy_(x)
        one.sent.subtract_from_(rest)
        two = yield from self.second.exchange(rest, inner_state(state, "second"), ctx.inside("second"))
        after = {**outer_state(one.state, "first"), **outer_state(two.state, "second")}
        return Outcome(two.mean.add_(one.mean), _Both(one.sent, two.sent), after)


@dataclass(frozen=True, slots=True)
class _Both(Transmitted):
    first: Transmitted
    second: Transmitted

    def subtract_from_(self, new_residual: Tensor) -> None:
        self.first.subtract_from_(new_residual)
        self.second.subtract_from_(new_residual)

    def dense(self, like: Tensor) -> Tensor:
        return self.first.dense(like).add_(self.second.dense(like))
