"""A prediction fitted by least squares, with the same bits on all ranks and devices: sums have one order."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import Context, Matrix
from tacit.prediction.predictor import AnswerPredictor, Layers, Past
from tacit.prediction.sent_subsets import size

KEPT = 0.9
"""The factor on earlier sums in each round."""
MOST = 1.5
"""The largest magnitude of a weight."""
RISE = 2.0
"""The largest factor on a past change when the learning rate has risen."""
LANES = 8192
"""The number of partial sums, which are then added in halves."""
RIDGE = 1e-6
"""Added to the squares, as a share of their mean, so that equal inputs have weights too."""


def products(vectors: Sequence[Tensor]) -> Tensor:
    """The sums of products of each vector with each, (k, k) in fp64; of fp32 each product is exact."""
    first, count = vectors[0], len(vectors)
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]
    lanes = [torch.zeros(min(LANES, len(first)), dtype=torch.float64, device=first.device) for _ in pairs]
    for start in range(0, len(first), LANES):
        parts = [each[start : start + LANES].double() for each in vectors]
        for lane, (i, j) in zip(lanes, pairs, strict=True):
            lane[: len(parts[0])].add_(parts[i] * parts[j])  # not fused, as devices would round differently
    sums = {pair: _halved(lane) for pair, lane in zip(pairs, lanes, strict=True)}
    each = range(count)
    return torch.stack([torch.stack([sums[max(i, j), min(i, j)] for j in each]) for i in each])


def _halved(lanes: Tensor) -> Tensor:
    while len(lanes) > 1:
        short = len(lanes) // 2
        half = len(lanes) - short
        lanes = torch.cat((lanes[:short] + lanes[half:], lanes[short:half]))
    return lanes.sum()


def weights(sums: Tensor) -> Tensor:
    """The weights (m, k) that predict, in each of m systems, the first vector from the k others.

    Args:
        sums: of `products`, (m, k + 1, k + 1).
    """
    squares, truth = sums[:, 1:, 1:], sums[:, 1:, :1]
    count = squares.shape[1]
    unit = torch.eye(count, dtype=sums.dtype, device=sums.device)
    mean = (squares * unit).sum((1, 2), keepdim=True) * (RIDGE / count)
    rows = torch.cat((squares + mean * unit, truth), 2)
    for i in range(count):  # by elimination, as a library's order of operations is unknown
        pivot = rows[:, i, i : i + 1]
        rows[:, i] = torch.where(pivot > 0, rows[:, i] / pivot, 0.0)
        for j in range(count):
            if j != i:
                rows[:, j] -= rows[:, j, i : i + 1] * rows[:, i]
    return rows[:, :, count].nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LeastSquares(AnswerPredictor):
    """Past answers, weighed for each layer by what would have been best so far. Ours.

    In a round with the learning rate S, with D_1 .. D_k the last k answers and S_i their rates, for each
    parameter:

        p <- sum of w_i D_i min(S / S_i, 2)    w_i: what would have been best in the rounds before

    The weights are by least squares, within +-1.5; that of a single change is from 0 to 1.5. A round counts a
    tenth less in each that follows, and however far the parameters move in it: so weights of one rate hold at
    the next. The rate is that of the round's last step, in fp32: ranks need the same. Sums are of fp64, and
    added in one order on every rank and device, so that all predict the same bits.

    It keeps of each parameter the sums of products of answer and past changes, (k + 1)^2, and k rates.

    Attributes:
        answers: k, from 1 to 8.
    """

    answers: int = 1

    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("answers", self.answers, 1, 8, "write 1 for the last answer alone, or 3")

    @property
    def depth(self) -> int:
        return self.answers

    @property
    def numbers(self) -> int:
        return (self.answers + 1) ** 2 + self.answers

    def answer_(self, guess: Tensor, past: Past, fit: Tensor | None, layers: Layers, ctx: Context) -> None:
        guess.zero_()
        term = guess if self.answers == 1 else ctx.scratch("term", guess, guess.shape, guess.dtype)
        if guess.is_meta or fit is None:
            return
        sums, rates = self._fit(fit)
        least = 0.0 if self.answers == 1 else -MOST
        each = (weights(sums).clamp(least, MOST) * self._ratios(rates, ctx)).to(guess.dtype)
        for mine, row in zip(_spans(guess, layers), each, strict=True):
            for i, answer in enumerate(past):
                torch.mul(answer[mine], row[i], out=term[mine])
                if term is not guess:
                    guess[mine].add_(term[mine])  # not fused, as devices would round differently

    def learn_(self, fit: Tensor, answer: Tensor, past: Past, layers: Layers, ctx: Context) -> None:
        """Add the products of this round to the sums, and its rate to the rates."""
        sums, rates = self._fit(fit)
        seen = [answer, *past]
        found = torch.stack([products([each[mine] for each in seen]) for mine in _spans(answer, layers)])
        unit = torch.cat((torch.ones_like(rates[:, :1]), self._ratios(rates, ctx)), 1)
        found = found * unit.unsqueeze(1) * unit.unsqueeze(2)
        moved = found.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1)
        sums.copy_(torch.where(moved > 0, KEPT * sums + found / moved, sums))
        rates[:, ctx.round % self.answers].fill_(_rate(ctx))

    def _fit(self, fit: Tensor) -> tuple[Tensor, Tensor]:
        """Views: the sums (layers, k + 1, k + 1), and rates (layers, k), of the fields in their order."""
        rows, side = fit.view(-1, self.numbers), self.answers + 1
        return rows[:, : side * side].view(-1, side, side), rows[:, side * side :]

    def _ratios(self, rates: Tensor, ctx: Context) -> Tensor:
        """This rate, in units of the past ones, oldest first; 0 where none is known."""
        then = rates.roll(-(ctx.round % self.answers), 1)
        return torch.where(then > 0, then.new_full((), _rate(ctx)) / then, 0.0).clamp(max=RISE)


def _spans(flat: Tensor, layers: Layers) -> list[slice]:
    return [slice(m.start, m.start + size(m)) for m in layers or (Matrix(0, 1, flat.numel()),)]


def _rate(ctx: Context) -> float:
    """In fp32: schedules of different machines may differ in the last bits of fp64."""
    rate: float = struct.unpack("f", struct.pack("f", ctx.lr))[0]
    return rate
