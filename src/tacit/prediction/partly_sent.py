"""Deltas of which a part is sent and the rest predicted, equally on all ranks (MP²: Liu et al. 2024)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import Compressor, Context, Exchange, Matrix, Outcome, State
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import refuse_overflow
from tacit.prediction.agreement_check import MARKS, Mirrored, checksum, compare, mark
from tacit.prediction.budget import Budgeted
from tacit.prediction.entry_history import FIELDS, SWINGS, ReceivedHistory, first, remembered, swings_after
from tacit.prediction.extrapolation import Stale
from tacit.prediction.gain import SUMS, gains, judged
from tacit.prediction.predictor import ROUNDS, Predictor, Seen, kind_of
from tacit.prediction.sent_subsets import size

_log = logging.getLogger("tacit")


@dataclass(frozen=True)
class Predicted(Budgeted):
    """Average a moving subset of the entries, and predict the others by the same function on every rank.

    In a round of n entries, of which w are sent in all rounds and k in rotation:

        S     <- the w, and k of the others, chosen by `Budgeted`
        a     <- mean of x over S                                2 (P - 1) / P x (w + k) bytes of `values`
        p     <- gain x shrink x predictor(the last two received changes, and their ages)
        result: a on S, p elsewhere; with `rescale` p + (a - p) / rho on those of S that take turns

    where rho is the share of the entries taking turns that is sent.

    Three numbers are sent with them. A prediction is not sent, as its inputs are equal on all ranks, and so
    are its bits: in every round ranks compare a checksum of the last answer.

    The gain, one for each parameter, from 0 to 1, is what the predictions of the rounds before should have
    been multiplied by (`gain.gains`). A sixteenth of the k entries is drawn at random from all that are not
    selected. Of these a prediction is made too, and compared with the mean. So predictions are evaluated on
    entries that were sent as long ago as those for which they are used, at no extra bytes: the k
    entries are within the budget. A predictor that is wrong comes to a gain of about 0, which is `Stale`.

    The part of a rank's x that has not been sent is lost, as in the paper, unless the merge is
    `LocalResidual`. `ErrorFeedback` around this would keep it, which with momentum in the optimizer is then
    applied twice, and diverges.

    State, equal on all ranks, besides that of `Budgeted`: for each entry `last` and `before`, the changes
    last received, and in int16 `age` and `gap`, for how many rounds each was the last one: in fp32 the memory
    of 3 parameters, and as much again during a round. Of each parameter `swings`, the root mean square of the
    changes of 16 rounds, and `judged`, the sums behind the gain; `answered`, a checksum. With `Stale` there
    are `rates` and `answered` alone.

    Attributes:
        predictor: computes the next change; with `Stale` entries that are not sent do not change.
        shrink: a factor on predictions besides the gain, in (0, 1]. Less trusts them less.
        rescale: whether a sent entry also stands for the rounds in which it is not sent. In the mean replicas
            then move as far as if all were sent; otherwise rho times as far.
    """

    predictor: Predictor = Stale()
    shrink: float = 1.0
    rescale: bool = False

    shared: ClassVar[frozenset[str]] = frozenset({"rates", "answered", SWINGS, "judged", *FIELDS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.predictor, Predictor):
            raise ConfigError(
                f"predictor={self.predictor!r} is no Predictor: write Stale(), Linear() or MP2()"
            )
        checks.flag("rescale", self.rescale)
        if self.rescale and self.subset == "magnitude":
            raise ConfigError(
                "rescale=True with subset='magnitude' is not possible, as the largest entries do not stand "
                "for others: leave one of them out"
            )
        checks.real("shrink", self.shrink, "write 1, or less to trust predictions less", above=0, most=1)

    @property
    def judges(self) -> bool:
        """Whether the predictor predicts any change."""
        return not isinstance(self.predictor, Stale)

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """See `Budgeted`; logs the kinds of layers that are not predicted."""
        kinds = {kind_of(m.dims) for m in matrices if self.takes_turns(m)}
        for kind in sorted(kinds - set(self.predictor.kinds())):
            _say_missing(self.predictor, kind)
        return super().for_model(matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """The numbers of learning rates, checksums, sizes of changes and sums for each parameter."""
        width = {"rates": 3, "answered": 1, SWINGS: ROUNDS, "judged": SUMS}.get(field)
        return None if width is None else tuple(width for _ in self.matrices)

    def init(self, like: Tensor) -> State:
        """The state before any change was received."""
        count, device = len(self.matrices), like.device
        state = {
            "rates": torch.zeros(3 * count, dtype=torch.float32, device=device),
            "answered": torch.zeros(count, dtype=torch.float32, device=device),
        }
        if self.judges:
            if not like.is_meta:
                self.predictor.prepare(like.device)
            state |= first(like)
            state[SWINGS] = torch.zeros(ROUNDS * count, dtype=torch.float64, device=device)
            state["judged"] = torch.zeros(SUMS * count, dtype=torch.float64, device=device)
        return state

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average the subset, predict the rest, and record the received changes."""
        marks = ctx.scratch("marks", x, (MARKS,), torch.float32)
        mark(marks, state["answered"], ctx.lr)
        selected = self.entries_of_round(self.is_full(state["rates"], ctx), ctx)
        index, values, mine, drawn = yield from self.averaged(x, selected, marks, ctx)
        compare(marks, ctx)
        after = dict(state)
        ctx.out.zero_()
        if self.judges and not x.is_meta:
            after |= self._predict(index, values, drawn, state, ctx)
        if self.rescale and not selected.full and not x.is_meta:
            values = self._rescaled(index, values, ctx.out)
        ctx.out.index_copy_(0, index, values)
        refuse_overflow(ctx.out, ctx)
        after["answered"] = self._checksums(state["answered"], ctx)
        lr = 0.0 if x.is_meta else float(marks[2])
        after["rates"] = self.rates_after(state["rates"], lr, selected.full, ctx)
        answer = ctx.scratch("answer", x, x.shape, x.dtype).copy_(ctx.out)
        return Outcome(ctx.out, Mirrored(answer, index, mine), after)

    def _rescaled(self, index: Tensor, values: Tensor, predicted: Tensor) -> Tensor:
        """The values that stand for all rounds of these entries; `predicted`: those of the others."""
        turning = torch.ones_like(index, dtype=torch.bool)
        turning[torch.searchsorted(index, self._always.to(index.device))] = False
        share = int(turning.sum()) / max(1, self._turning)
        guess = predicted.index_select(0, index)
        return torch.where(turning, guess + (values - guess) / max(share, 1e-30), values)

    # ---- the other entries ----------------------------------------------------------------------------

    def _predict(
        self, index: Tensor, values: Tensor, drawn: Tensor, state: State, ctx: Context
    ) -> dict[str, Tensor]:
        """Write predictions to `ctx.out`, of all rotating entries; return the new state."""
        swings, ratios = swings_after(state, self._by_parameter(index, values), ctx)
        history = ReceivedHistory(state, ratios)
        sums = ctx.spare("judged", state["judged"])
        sums.view(-1, SUMS).copy_(self._judged(index, values, drawn, history))
        for i, gain in enumerate(gains(sums.view(-1, SUMS))):
            m = self.matrices[i]
            if gain and self.takes_turns(m):
                self._write(i, m, gain, history, ctx.out)
        return {SWINGS: swings, "judged": sums, **remembered(state, index, values, ctx)}

    def _by_parameter(self, index: Tensor, values: Tensor) -> Sequence[Tensor]:
        """The values of each parameter; `index` rises."""
        stops = torch.tensor([m.start + size(m) for m in self.matrices], device=index.device)
        ends = torch.searchsorted(index, stops).tolist()
        return torch.split(values, [end - start for start, end in pairwise([0, *ends])])

    def _judged(self, index: Tensor, values: Tensor, drawn: Tensor, history: ReceivedHistory) -> Tensor:
        """The sums behind the gains, with the means of the drawn entries."""
        stops = torch.tensor([m.start + size(m) for m in self.matrices], device=index.device)
        owner = torch.searchsorted(stops, drawn, right=True)
        seen, known = history.judging(drawn, owner)
        true = values[torch.searchsorted(index, drawn)]
        guess = torch.zeros_like(true)
        kinds = [kind_of(m.dims) for m in self.matrices]
        for kind in dict.fromkeys(kinds):
            mine = known & torch.tensor([each == kind for each in kinds], device=index.device)[owner]
            if bool(mine.any()):
                guess[mine] = self.predictor.change(Seen(*(each[:, mine] for each in seen)), kind)
        sums = history.state["judged"].view(-1, SUMS)
        return judged(sums, owner[known], guess[known] * self.shrink, true[known])

    def _write(self, i: int, m: Matrix, gain: float, history: ReceivedHistory, out: Tensor) -> None:
        span = slice(m.start, m.start + size(m))
        received = history.of(span, i)
        self.predictor.write_received(received, kind_of(m.dims), out[span], gain * self.shrink)

    def _checksums(self, before: Tensor, ctx: Context) -> Tensor:
        """The checksum of each parameter's part of `ctx.out`."""
        found = ctx.spare("answered", before)
        if ctx.out.is_meta:
            return found
        sums = [checksum(ctx.out[m.start : m.start + size(m)]) for m in self.matrices]
        return found.copy_(torch.tensor(sums, dtype=torch.float32))


def with_predictor(compressor: Compressor, predictor: Predictor, shrink: float) -> Predicted:
    """The same, with another predictor, whose changes are multiplied by `shrink`."""
    assert isinstance(compressor, Predicted)
    return replace(compressor, predictor=predictor, shrink=shrink)


@cache
def _say_missing(predictor: Predictor, kind: str) -> None:
    _log.warning("%s has nothing for layers of kind %r: they are predicted not to change", predictor, kind)
