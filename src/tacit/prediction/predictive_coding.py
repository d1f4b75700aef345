"""Predictive coding: the error of a prediction that all ranks share is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Context, Exchange, Matrix, OneShotUse, State, Transmitted
from tacit.errors import ConfigError
from tacit.prediction.extrapolation import Persistent
from tacit.prediction.predictor import AnswerPredictor

FIT = "fit"
"""The state field of the numbers from which a predictor learns."""


def fields(depth: int, round_: int) -> list[str]:
    """The names of the last `depth` answers before this round, oldest first; that one is replaced next."""
    return [f"past{(round_ + i) % depth}" for i in range(depth)]


@dataclass(frozen=True)
class Shifted(Transmitted):
    """What was sent plus a tensor that all ranks add to it without sending it."""

    by: Tensor
    inner: Transmitted

    def subtract_from_(self, new_residual: Tensor) -> None:
        """Subtract both parts."""
        new_residual.sub_(self.by)
        self.inner.subtract_from_(new_residual)

    def dense(self, like: Tensor) -> Tensor:
        """The sum of both parts."""
        return self.inner.dense(like) + self.by.view_as(like)


@dataclass(frozen=True)
class PredictiveCoding(Wrapper):
    """Compress the error of a prediction, and add the prediction to the mean error. Ours.

    In a round, with a_1 .. a_d the last d answers, equal on all ranks:

        p       <- predictor(a_1 .. a_d)                        the same bits on every rank; nothing is sent
        r       <- the inner compressor's mean of x - p    its bytes
        answer  <- p + r

    Put it around `ErrorFeedback`, or use the merge `LocalResidual`: the part of x - p that is not sent then
    stays in the residual, or in the replica, with the errors of predictions: all answers plus the residual
    are the sum of all inputs, so a wrong prediction is corrected later. Meant for deltas of several steps,
    which are more alike from round to round than gradients are.

    DIANA (Mishchenko et al. 2019) and EF21 (Richtarik, Sokolov & Fatkhullin 2021) send compressed differences
    too: to each worker's own last estimate, which it and the server keep. Here one prediction, of the
    mean, serves all, and may be any function of the past.

    State: `past0` and so on, the last answers in turn, and `fit`, what the predictor learns from, both equal
    on all ranks; and that of the inner compressor.

    Attributes:
        predictor: computes the next answer from the last ones. An answer is what all ranks applied,
            also where it was predicted, so that all of them count as received.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    predictor: AnswerPredictor = Persistent()
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.predictor, AnswerPredictor):
            raise ConfigError(
                f"predictor={self.predictor!r} is no Predictor: write Persistent(0.5), Linear() or MP2()"
            )
        checks.matrices(self.matrices)

    @property
    def on_device(self) -> bool:
        return self.predictor.on_device and self.inner.on_device

    def one_shot(self, step: int) -> OneShotUse | None:
        """That of the inner compressor, for errors: a payload is useless without the prediction."""
        one_shot = self.inner.one_shot(step)
        return one_shot and one_shot._replace(is_predicted=True)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> PredictiveCoding:
        """The same with these parameters as `matrices`."""
        return replace(self, inner=self.inner.with_layout(matrices), matrices=matrices)

    def is_shared(self, field: str) -> bool:
        """Past answers are equal on all ranks, and what is learnt from them."""
        return field.startswith("past") or field == FIT or super().is_shared(field)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """Of `fit`, as many numbers for each parameter."""
        return (self.predictor.numbers,) * len(self.matrices) if field == FIT else super().widths(field)

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and zeros."""
        if not like.is_meta:
            self.predictor.prepare(like.device)
        past = {field: torch.zeros_like(like) for field in fields(self.predictor.depth, 0)}
        state = {**past, **outer_state(self.inner.init(like), "inner")}
        if numbers := self.predictor.numbers * max(1, len(self.matrices)):
            state[FIT] = torch.zeros(numbers, dtype=torch.float64, device=like.device)
        return state

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Predict, run the inner exchange on the error, and record the answer."""
        guess = ctx.scratch("guess", x, x.shape, x.dtype)
        rest = ctx.scratch("rest", x, x.shape, x.dtype)
        self.predict_(guess, state, ctx)
        torch.sub(x, guess, out=rest)
        done = yield from self.inner.exchange(rest, inner_state(state, "inner"), ctx.inside("inner"))
        torch.add(done.mean, guess, out=ctx.out)
        oldest, *others = fields(self.predictor.depth, ctx.round)
        after = {oldest: ctx.spare(oldest, state[oldest]).copy_(ctx.out)}
        after |= {field: state[field] for field in others}
        if FIT in state:
            after[FIT] = ctx.spare(FIT, state[FIT])
            if not x.is_meta:
                past = self._past(state, ctx)
                self.predictor.learn_(after[FIT].copy_(state[FIT]), ctx.out, past, self.matrices, ctx)
        after |= outer_state(done.state, "inner")
        return done._replace(mean=ctx.out, finite=False, sent=Shifted(guess, done.sent), state=after)

    def predict_(self, guess: Tensor, state: State, ctx: Context) -> None:
        """Overwrite `guess` with the prediction of this round's answer, the same bits on all ranks."""
        self.predictor.answer_(guess, self._past(state, ctx), state.get(FIT), self.matrices, ctx)

    def _past(self, state: State, ctx: Context) -> list[Tensor]:
        return [state[field] for field in fields(self.predictor.depth, ctx.round)]
