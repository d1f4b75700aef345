"""Leaps along where the parameters have been going (WNN: Jang, Ko, Park & Lee, ICML 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Compressor, Context, Exchange, Matrix, State, state_dtype
from tacit.errors import ConfigError
from tacit.prediction.extrapolation import Stale
from tacit.prediction.history import Shifted, fields, foretell_
from tacit.prediction.predictor import Predictor

VALUES = 5
"""How many snapshots a forecast is made from, and how many periods it leaps."""
DEPTH = VALUES - 1
"""Changes between them."""


@dataclass(frozen=True)
class Nowcast(Wrapper):
    """Let the one inside average progress, and after every fifth period leap five periods ahead.

    At the ends of periods the parameters are looked at; from five such values the predictor tells where they
    will be five periods later, and all ranks go there. Nothing travels for it: what it is told from are the
    answers, which all ranks have. What training then needs less of is steps, and with them bytes.

    Tensors of one dimension do not leap. The paper leaves out the layers of batch norm, whose running
    variance must not come below 0, and forecasts biases; of a flat vector it is not known which of them it
    is, so all stay with the one inside.

    State, equal on all ranks: `past0` to `past3`, the changes of the last periods, of which one is under way;
    and that of the one inside.

    Attributes:
        predictor: told four changes, it gives the mean change of the next five periods: `WNN()`.
        period: rounds from one look to the next; the paper's are epochs.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    predictor: Predictor = Stale()
    period: int = 20
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.predictor, Predictor):
            raise ConfigError(f"predictor={self.predictor!r} is no Predictor: write WNN() or Linear()")
        checks.whole("period", self.period, 1, None, "write how many rounds an epoch has, say")
        checks.matrices(self.matrices)

    def exempts(self, shape: torch.Size) -> bool:
        """Tensors of one dimension; and what the one inside exempts."""
        return len(shape) < 2 or self.inner.exempts(shape)

    def exempted(self) -> Compressor | None:
        """The one inside, or what handles vectors where it exempts them."""
        return self.inner.exempted() if self.inner.exempts(torch.Size((1,))) else self.inner

    def one_shot(self, step: int) -> None:
        """A conversation of its own, now and then: a server could not leap."""
        return

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Nowcast:
        """The same for these parameters."""
        return replace(self, inner=self.inner.with_layout(matrices), matrices=matrices)

    def is_shared(self, field: str) -> bool:
        """What it remembers is."""
        return field.startswith("past") or super().is_shared(field)

    def init(self, like: Tensor) -> State:
        """Nothing has moved yet."""
        kind = state_dtype(like.dtype)  # of many small changes, in two bytes the later ones would be lost
        mine = {field: torch.zeros_like(like, dtype=kind) for field in fields(DEPTH, 0)}
        return {**mine, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average, and add it to what has moved in this period; at the end of every fifth, leap."""
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
        foretell_(leap, self.predictor, past, self.matrices, VALUES)
        torch.add(done.mean, leap, out=ctx.out)
        return done._replace(mean=ctx.out, sent=Shifted(leap, done.sent), state=after)
