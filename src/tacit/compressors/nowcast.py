"""Leaps along where the parameters have been going (WNN: Jang, Ko, Park & Lee, ICML 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.past import Shifted, fields, foretell_
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Context, Exchange, Matrix, State
from tacit.errors import ConfigError
from tacit.predictors import Predictor, Stale

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

    State, equal on all ranks: `past0` to `past3`, the changes of the last periods, `moved`, that of this
    one; and that of the one inside.

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
        if not isinstance(self.predictor, Predictor) or self.predictor.depth != DEPTH:
            raise ConfigError(
                f"predictor={self.predictor!r} does not look at {DEPTH} changes: write WNN() or Linear()"
            )
        checks.whole("period", self.period, 1, None, "write how many rounds an epoch has, say")
        checks.matrices(self.matrices)

    def spoken(self, step: int) -> None:
        """A conversation of its own, now and then: a server could not leap."""
        return

    def bound(self, matrices: tuple[Matrix, ...]) -> Nowcast:
        """The same for these parameters."""
        return replace(self, inner=self.inner.bound(matrices), matrices=matrices)

    def is_shared(self, field: str) -> bool:
        """What it remembers is."""
        return field == "moved" or field.startswith("past") or super().is_shared(field)

    def init(self, like: Tensor) -> State:
        """Nothing has moved yet."""
        mine = {field: torch.zeros_like(like) for field in ("moved", *fields(DEPTH, 0))}
        return {**mine, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average; at the end of a period remember it; at the end of every fifth, leap."""
        leap = ctx.scratch("leap", x, x.shape, x.dtype)
        done = yield from self.inner.exchange(x, inner_state(state, "inner"), ctx.inside("inner"))
        moved = ctx.spare("moved", state["moved"])
        torch.add(state["moved"], done.mean, out=moved)
        kept = {field: tensor for field, tensor in state.items() if not field.startswith("inner.")}
        after = {**kept, "moved": moved, **outer_state(done.state, "inner")}
        ended, rest = divmod(ctx.round + 1, self.period)
        if rest:
            return done._replace(state=after)
        oldest = fields(DEPTH, ended)[0]
        after[oldest] = ctx.spare(oldest, state[oldest]).copy_(moved)
        moved.zero_()
        if ended % VALUES or x.is_meta:
            return done._replace(state=after)
        leap.zero_()
        past = [after[field] for field in fields(DEPTH, ended + 1)]
        foretell_(leap, self.predictor, past, self.matrices, VALUES)
        torch.add(done.mean, leap, out=ctx.out)
        return done._replace(mean=ctx.out, sent=Shifted(leap, done.sent), state=after)
