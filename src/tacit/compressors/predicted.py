"""Progress of which a part is sent and the rest predicted, alike on all ranks (MP²: Liu et al. 2024)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.budget import Budgeted
from tacit.compressors.mirrored import MARKS, Mirrored, compare, mark
from tacit.compressors.past import fields
from tacit.compressors.turns import size
from tacit.contracts import Compressor, Context, Exchange, Matrix, Outcome, State, refuse_overflow
from tacit.errors import ConfigError
from tacit.predictors import Predictor, Stale, kind_of

_log = logging.getLogger("tacit")


@dataclass(frozen=True)
class Predicted(Budgeted):
    """Average a moving subset of the entries, and predict the others by the same function on every rank.

    In a round of n entries, of which w travel in all of them and k take turns:

        S     <- the w, and k of the others, as `Budgeted` says
        a     <- mean of x over S                                2 (P - 1) / P x (w + k) bytes of `values`
        p     <- shrink x predictor(the last `depth` answers, a layer's mean of a); 0 before there are so many
        result: a on S, p elsewhere

    With three numbers beside them. A prediction does not travel, as its inputs are equal on all ranks, and so
    are its bits: in every round ranks compare a checksum of the last answer.

    What a rank's own x was where it has not been sent is lost, as in the paper, unless the merge is `Keep`.
    `ErrorFeedback` around this would owe it, which with momentum in the optimizer lets it be applied twice,
    and diverges.

    State, equal on all ranks, beside that of `Budgeted`: `past0` and so on, the last answers, in turn;
    `faults`, for how many rounds in a row the predictor was worse than no change, by parameter. That is seen
    on S, where both are known; it says nothing of where many predictions lead, one upon the other.

    Attributes:
        predictor: what tells the next change; `Stale` leaves at rest what is not sent.
        shrink: what predictions are multiplied by, in (0, 1]. Less trusts them less.
        patience: after so many rounds worse than no change in a row a parameter is not predicted, until it
            would have been better again.
    """

    predictor: Predictor = Stale()
    shrink: float = 1.0
    patience: int = 3

    shared: ClassVar[frozenset[str]] = frozenset(
        {"faults", "rates", *(f"past{i}" for i in range(Predictor.depth))}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.predictor, Predictor):
            raise ConfigError(
                f"predictor={self.predictor!r} is no Predictor: write Stale(), Linear() or MP2()"
            )
        checks.real("shrink", self.shrink, "write 1, or less to trust predictions less", above=0, most=1)
        checks.whole("patience", self.patience, 1, None, "3 is usual")

    def fitted(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """See `Budgeted`; kinds of layers that are not predicted are said."""
        kinds = {kind_of(m.dims) for m in matrices if self.takes_turns(m)}
        for kind in sorted(kinds - set(self.predictor.kinds())):
            _say_missing(self.predictor, kind)
        return super().fitted(matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """Each parameter has its count of faults, and its learning rates."""
        width = {"faults": 1, "rates": 3}.get(field)
        return None if width is None else tuple(width for _ in self.matrices)

    def init(self, like: Tensor) -> State:
        """Nothing has moved yet."""
        past = {field: torch.zeros_like(like) for field in fields(self.predictor.depth, 0)}
        count = len(self.matrices)
        rates = torch.zeros(3 * count, dtype=torch.float32, device=like.device)
        return {**past, "faults": like.new_zeros(count), "rates": rates}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average the subset, predict the rest, and remember both."""
        oldest, *_, newest = fields(self.predictor.depth, ctx.round)
        marks = ctx.scratch("marks", x, (MARKS,), torch.float32)
        mark(marks, state[newest], ctx.lr)
        full = self.is_full(state["rates"], ctx)
        index, values, mine = yield from self.heard(x, full, marks, ctx)
        compare(marks, ctx)
        faults = self._predict(index, values, state, ctx)
        ctx.out.index_copy_(0, index, values)
        refuse_overflow(ctx.out, ctx)
        answer = ctx.spare(oldest, state[oldest]).copy_(ctx.out)
        rates = self.rates_after(state["rates"], float(marks[2]) if not x.is_meta else 0.0, full, ctx)
        after = {**state, oldest: answer, "faults": faults, "rates": rates}
        return Outcome(ctx.out, Mirrored(answer, index, mine), after)

    # ---- what becomes of the others -------------------------------------------------------------------

    def _predict(self, index: Tensor, values: Tensor, state: State, ctx: Context) -> Tensor:
        """Overwrite `ctx.out` with predictions, of all entries; return the new count of faults."""
        faults = ctx.spare("faults", state["faults"])
        ctx.out.zero_()
        if ctx.out.is_meta or ctx.round < self.predictor.depth or isinstance(self.predictor, Stale):
            return faults.copy_(state["faults"])
        past = [state[field] for field in fields(self.predictor.depth, ctx.round)]
        counts = state["faults"].tolist()
        for i, (m, (a, b)) in enumerate(zip(self.matrices, self._parts(index), strict=True)):
            if not self.takes_turns(m) or a == b:
                continue
            self._predict_one(m, past, values[a:b].float().mean(), ctx.out)
            worse = _worse(ctx.out[index[a:b]], values[a:b])
            if counts[i] >= self.patience:
                ctx.out[m.start : m.start + size(m)] = 0
            counts[i] = min(counts[i] + 1, self.patience) if worse else 0
        return faults.copy_(torch.tensor(counts))

    def _predict_one(self, m: Matrix, past: list[Tensor], trend: Tensor, out: Tensor) -> None:
        span = slice(m.start, m.start + size(m))
        seen = [each[span] for each in past]
        self.predictor.write(seen, trend, kind_of(m.dims), out[span], self.shrink)

    def _parts(self, index: Tensor) -> Iterator[tuple[int, int]]:
        """Which of the chosen entries belong to each parameter, as (first, behind the last)."""
        edges = [[m.start, m.start + size(m)] for m in self.matrices]
        at = torch.searchsorted(index, torch.tensor(edges, device=index.device))
        return ((a, b) for a, b in at.tolist())


def _worse(guess: Tensor, true: Tensor) -> bool:
    """Whether it is farther from the truth than zero is."""
    guess, true = guess.float(), true.float()
    return bool(torch.linalg.vector_norm(guess - true) > torch.linalg.vector_norm(true))


@cache
def _say_missing(predictor: Predictor, kind: str) -> None:
    _log.warning("%s has nothing for layers of kind %r: they are predicted not to change", predictor, kind)
