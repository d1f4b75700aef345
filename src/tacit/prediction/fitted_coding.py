"""Predictive coding whose prediction is fitted to each layer as training runs."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import Context, Matrix, State
from tacit.prediction.history import fields
from tacit.prediction.least_squares import products, weights
from tacit.prediction.predictive_coding import SharedPrediction
from tacit.prediction.subsets import size

KEPT = 0.9
"""The factor on earlier sums in each round."""
MOST = 1.5
"""The largest magnitude of a weight."""
RISE = 2.0
"""A past change counts as at most so many times what it was, however far the learning rate has risen."""


@dataclass(frozen=True)
class FittedCoding(SharedPrediction):
    """Compress the error of a prediction that is fitted to each layer by least squares. Ours.

    In a round with the learning rate S, with D_1 .. D_k the last k answers and S_i their rates, for each
    parameter:

        p      <- sum of w_i D_i min(S / S_i, 2)    w_i: what would have been best in the rounds before
        r      <- the inner compressor's mean of x - p
        answer <- p + r

    The weights are by least squares, within +-1.5; that of a single change is from 0 to 1.5. A round counts
    a tenth less in each that follows, and however far the parameters move in it: so what was found at one
    rate holds at the next. The rate is that of the round's last step, in fp32: ranks need the same.
    As with `PredictiveCoding`, what is not sent must stay in the replica or in a residual; a prediction
    then decides no more than what is rounded. Sums are of fp64, and added in one order on every rank and
    device, so that all predict the same bits.

    State, equal on all ranks: `past0` and so on, the last answers in turn; `fit`, of each parameter in fp64
    the sums of products of answer and past changes, (k + 1)^2, and k rates.

    Attributes:
        answers: k, from 1 to 8.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    answers: int = 1
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("answers", self.answers, 1, 8, "write 1 for the last answer alone, or 3")
        checks.matrices(self.matrices)

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    @property
    def depth(self) -> int:
        return self.answers

    def with_layout(self, matrices: tuple[Matrix, ...]) -> FittedCoding:
        """The same with these parameters as `matrices`."""
        return replace(self, inner=self.inner.with_layout(matrices), matrices=matrices)

    def is_shared(self, field: str) -> bool:
        return field == "fit" or super().is_shared(field)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """Of `fit`, as many numbers for each parameter."""
        return tuple(self._width for _ in self.matrices) if field == "fit" else super().widths(field)

    @property
    def _width(self) -> int:
        return (self.answers + 1) ** 2 + self.answers

    def init(self, like: Tensor) -> State:
        """Zeros: at first no change is predicted."""
        numbers = self._width * len(self._layers(like))
        return {**super().init(like), "fit": torch.zeros(numbers, dtype=torch.float64, device=like.device)}

    def predict_(self, guess: Tensor, state: State, ctx: Context) -> None:
        guess.zero_()
        term = guess if self.answers == 1 else ctx.scratch("term", guess, guess.shape, guess.dtype)
        if guess.is_meta:
            return
        sums, rates = self._fit(state["fit"])
        least = 0.0 if self.answers == 1 else -MOST
        each = (weights(sums).clamp(least, MOST) * self._ratios(rates, ctx)).to(guess.dtype)
        for m, row in zip(self._layers(guess), each, strict=True):
            mine = slice(m.start, m.start + size(m))
            for i, field in enumerate(fields(self.answers, ctx.round)):
                torch.mul(state[field][mine], row[i], out=term[mine])
                if term is not guess:
                    guess[mine].add_(term[mine])  # not fused, as devices would round otherwise

    def learnt(self, state: State, ctx: Context) -> State:
        """The sums with those of this round, and its rate."""
        after = ctx.spare("fit", state["fit"])
        if after.is_meta:
            return {"fit": after}
        sums, rates = self._fit(after.copy_(state["fit"]))
        seen = [ctx.out, *(state[field] for field in fields(self.answers, ctx.round))]
        layers = [slice(m.start, m.start + size(m)) for m in self._layers(ctx.out)]
        found = torch.stack([products([each[mine] for each in seen]) for mine in layers])
        unit = torch.cat((torch.ones_like(rates[:, :1]), self._ratios(rates, ctx)), 1)
        found = found * unit.unsqueeze(1) * unit.unsqueeze(2)
        moved = found.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1)
        sums.copy_(torch.where(moved > 0, KEPT * sums + found / moved, sums))
        rates[:, ctx.round % self.answers].fill_(_rate(ctx))
        return {"fit": after}

    def _layers(self, flat: Tensor) -> tuple[Matrix, ...]:
        return self.matrices or (Matrix(0, 1, flat.numel()),)

    def _fit(self, fit: Tensor) -> tuple[Tensor, Tensor]:
        """Views: the sums (layers, k + 1, k + 1), and rates (layers, k), of the fields in their order."""
        rows, side = fit.view(-1, self._width), self.answers + 1
        return rows[:, : side * side].view(-1, side, side), rows[:, side * side :]

    def _ratios(self, rates: Tensor, ctx: Context) -> Tensor:
        """This rate, in units of the past ones, oldest first; 0 where none is known."""
        then = rates.roll(-(ctx.round % self.answers), 1)
        return torch.where(then > 0, then.new_full((), _rate(ctx)) / then, 0.0).clamp(max=RISE)


def _rate(ctx: Context) -> float:
    """In fp32: schedules of different machines may differ in the last bits of fp64."""
    rate: float = struct.unpack("f", struct.pack("f", ctx.lr))[0]
    return rate
