"""Jumps of all parameters to their predicted values (WNN: Jang et al., ICML 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Compressor, Context, Exchange, Matrix, State, state_dtype
from tacit.errors import ConfigError
from tacit.prediction.extrapolation import Stale
from tacit.prediction.predictive_coding import Shifted, fields
from tacit.prediction.predictor import Predictor

VALUES = 5
"""The number of snapshots of a forecast, and the number of periods that it jumps ahead."""
DEPTH = VALUES - 1
"""The number of changes between snapshots."""


@dataclass(frozen=True)
class Nowcast(Wrapper):
    """Average deltas by the inner compressor, and after every fifth period jump five periods ahead.

    At the end of each period the parameters are recorded; from five such values the predictor computes
    those of five periods later, and all ranks take them. Nothing is sent for it, as it depends only on
    answers, which all ranks have. What it saves is steps of training, and with them bytes.

    Tensors of one dimension do not jump. The paper leaves out the layers of batch norm, whose running
    variance must not come below 0, and forecasts biases; of a flat vector it is not known which of them it
    is, so all are left to the inner compressor.

    State, equal on all ranks: `past0` to `past3`, the changes of the last periods, the present one among
    them; and that of the inner compressor.

    Attributes:
        predictor: from four changes it gives the mean change of the next five periods: `WNN()`.
        period: rounds from one record to the next; the paper's are epochs.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    predictor: Predictor = Stale()
    period: int = 20
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.predictor, Predictor):
            raise ConfigError(f"predictor={self.predictor!r} is no Predictor: write WNN() or Linear()")
        checks.whole("period", self.period, 1, None, "write how many rounds an epoch has, for example")
        checks.matrices(self.matrices)

    def exempts(self, shape: torch.Size) -> bool:
        """Tensors of one dimension; and what the inner compressor exempts."""
        return len(shape) < 2 or self.inner.exempts(shape)

    def exempted(self) -> Compressor | None:
        """The inner compressor's compressor for exempted parameters; without one, the inner compressor."""
        return self.inner.exempted() if self.inner.exempts(torch.Size((1,))) else self.inner

    def one_shot(self, step: int) -> None:
        """None: every fifth period is more than an encoding, which a server could not do."""
        return

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Nowcast:
        """The same with these parameters as `matrices`."""
        return replace(self, inner=self.inner.with_layout(matrices), matrices=matrices)

    def is_shared(self, field: str) -> bool:
        """True for the fields of this wrapper, which are equal on all ranks."""
        return field.startswith("past") or super().is_shared(field)

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and zeros."""
        kind = state_dtype(like.dtype)  # in two bytes small changes would not add up
        mine = {field: torch.zeros_like(like, dtype=kind) for field in fields(DEPTH, 0)}
        return {**mine, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average, and add the mean to this period's change; at the end of every fifth period, jump."""
        leap = ctx.scratch("leap", x, x.shape, x.dtype)
        done = yield from self.inner.exchange(x, inner_state(state, "inner"), ctx.inside("inner"))
        number, over = divmod(ctx.round, self.period)
        field = fields(DEPTH, number)[0]  # that of four periods ago, which nobody looks at any more
        moved = ctx.spare(field, state[field])
        if over:
            torch.add(state[field], done.mean, out=moved)
        else:
            moved.copy_(done.mean)
        kept = {name: tensor for name, tensor in state.items() if not name.startswith("inner.")}
        after = {**kept, field: moved, **outer_state(done.state, "inner")}
        ends = over == self.period - 1 and number % VALUES == VALUES - 1
        if not ends or x.is_meta:
            return done._replace(state=after)
        leap.zero_()
        past = [after[name].to(x.dtype) for name in fields(DEPTH, number + 1)]
        self.predictor.predict_(leap, past, self.matrices, VALUES)
        torch.add(done.mean, leap, out=ctx.out)
        return done._replace(mean=ctx.out, finite=False, sent=Shifted(leap, done.sent), state=after)
