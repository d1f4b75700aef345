"""The interface of predictors: pure functions of received changes, equal on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tacit.contracts import Context, Matrix
from tacit.kernels.dispatch import on_host, pieces

Past: TypeAlias = Sequence[Tensor]
Layers: TypeAlias = Sequence[Matrix]

ROUNDS = 16
"""The number of past rounds for which the size of a layer's changes is known."""
PIECE = 8192
"""The number of elements that are predicted at a time, which fit into a core's cache."""
KINDS = ("convolution", "linear", "vector")
"""The kinds of layers that an element may belong to; "linear": any matrix, an embedding too; "vector": a
bias, or a norm's weight.
"""


def kind_of(dims: int) -> str:
    """The kind of a parameter of this number of dimensions."""
    return "vector" if dims < 2 else "linear" if dims == 2 else "convolution"


class Seen(NamedTuple):
    """The history of `n` elements of one layer: received changes, never predictions.

    Attributes:
        changes: shape (k, n): the last k received changes, newest last.
        ages: shape (k, n), fp32: how many rounds ago each was made, 1 or more; 1: in the round before.
        swings: shape (k, n), fp32: the root mean square of the layer's changes in this round, divided by that
            in the round of each change; 1 where it is not known.
    """

    changes: Tensor
    ages: Tensor
    swings: Tensor

    def newest(self, count: int) -> Seen:
        """The last `count` changes."""
        return Seen(*(each[-count:] for each in self))


def in_a_row(changes: Tensor) -> Seen:
    """The history of changes (k, n) received in consecutive rounds up to the last one."""
    ages = torch.arange(len(changes), 0, -1, dtype=torch.float32, device=changes.device)
    swings = torch.ones((), dtype=torch.float32, device=changes.device)
    return Seen(changes, ages.unsqueeze(1).expand(changes.shape), swings.expand(changes.shape))


class Received(NamedTuple):
    """The history of `n` elements of one layer that are not received in every round.

    Attributes:
        before: (n,): the change received before the last one.
        last: (n,): the last received change.
        age: (n,), int16: for how many rounds `last` has been the last one; `gap`: for how many `before` was.
            Where one of them is not above 0, changes of two rounds are not known.
        ratios: (rounds + 1,), fp32: the present size of the layer's changes over that of so many rounds ago.
    """

    before: Tensor
    last: Tensor
    age: Tensor
    gap: Tensor
    ratios: Tensor

    def seen(self, piece: slice) -> Seen:
        """The history of a span; zeros where changes of two rounds are not known."""
        before, last, age, gap = (each[piece] for each in self[:4])
        return seen_of(before, last, age, gap, lambda rounds: self.ratios.index_select(0, rounds))


def seen_of(
    before: Tensor, last: Tensor, age: Tensor, gap: Tensor, ratio: Callable[[Tensor], Tensor]
) -> Seen:
    """The history of elements by the fields of `Received`; `ratio` looks up those of (2 n) rounds."""
    known = torch.minimum(age, gap).clamp_(0, 1)
    ages = torch.stack((age.int() + gap, age.int())).clamp_(min=1)
    swings = ratio(ages.clamp(max=ROUNDS).view(-1)).view_as(ages)
    return Seen(torch.stack((before, last)).mul_(known), ages.float(), swings)


class AnswerPredictor(ABC):
    """Predicts the answer of a round from the last ones, equal on all ranks. A frozen dataclass: a value."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """The number of past answers that it uses."""

    @property
    def on_device(self) -> bool:
        """Whether it predicts on a GPU with the same bits on all, without a value on the host."""
        return False

    @property
    def numbers(self) -> int:
        """The number of fp64 values for each parameter, equal on all ranks, that it learns from."""
        return 0

    def prepare(self, device: torch.device) -> None:
        """Prepare for predictions on a device, for example by copying weights; may be called often."""
        return

    @abstractmethod
    def answer_(self, guess: Tensor, past: Past, fit: Tensor | None, layers: Layers, ctx: Context) -> None:
        """Overwrite `guess` (flat) with the prediction of this round's answer, the same bits on all ranks.

        Args:
            past: the last `depth` answers, oldest first; zeros for those that there were not.
            fit: its `numbers` of all parameters; None: it has none.
            layers: the parameters; none: all of `guess` is one vector.
        """

    def learn_(self, fit: Tensor, answer: Tensor, past: Past, layers: Layers, ctx: Context) -> None:
        """Change `fit` by this round's answer; `past` is without it."""
        return


class Predictor(AnswerPredictor):
    """Predicts the next change of each element. A frozen dataclass: a value, without state."""

    depth: ClassVar[int] = 2
    """The number of past changes that it uses."""

    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that it predicts; others are predicted not to change."""
        return KINDS

    @property
    def operations(self) -> int | None:
        """Floating-point operations an element, at most, by the formulas; None: not counted."""
        return None

    @abstractmethod
    def change(self, seen: Seen, kind: str) -> Tensor:
        """The next change of `n` elements of one layer; 0 where all past changes are 0.

        Args:
            seen: the last `depth` changes of each element, or the last 2, where `depth` is more and only they
                are known. Not altered.
            kind: one of `KINDS`.

        Returns:
            Shape (n,), in the type of the changes. The same elements in the same calls give the same bits.
        """

    def write(self, seen: Callable[[slice], Seen], kind: str, out: Tensor, scale: float = 1.0) -> None:
        """Overwrite `out`, (n,), with `scale` times the next changes; `seen` returns a span's history.

        On a GPU all of it is one span.
        """
        for piece in pieces(out, PIECE):
            torch.mul(self.change(seen(piece), kind), scale, out=out[piece])

    def write_received(self, received: Received, kind: str, out: Tensor, scale: float = 1.0) -> None:
        """As `write`, for elements that are not received in every round."""
        self.write(received.seen, kind, out, scale)

    def answer_(self, guess: Tensor, past: Past, fit: Tensor | None, layers: Layers, ctx: Context) -> None:
        guess.zero_()
        if not guess.is_meta and ctx.round >= self.depth:
            self.predict_(guess, past, layers)

    def predict_(self, out: Tensor, past: Past, layers: Layers, scale: float = 1.0) -> None:
        """Overwrite these parameters in `out` (flat) with `scale` times the predicted changes.

        `past`: all changes of the last rounds, oldest first. Without parameters, all of it is one vector.
        """
        for mine, kind in _spans(layers or (Matrix(0, 1, out.numel()),), joined=not on_host(out)):
            parts = [each[mine] for each in past]

            def seen(piece: slice, parts: Sequence[Tensor] = parts) -> Seen:
                return in_a_row(torch.stack([part[piece] for part in parts]))

            self.write(seen, kind, out[mine], scale)


def _spans(layers: Layers, joined: bool) -> list[tuple[slice, str]]:
    """The span and the kind of each matrix; `joined`: neighbours of one kind are one span."""
    found: list[tuple[slice, str]] = []
    for m in layers:
        stop, kind = m.start + m.rows * m.columns, kind_of(m.dims)
        if joined and found and found[-1][0].stop == m.start and found[-1][1] == kind:
            found[-1] = slice(found[-1][0].start, stop), kind
        else:
            found.append((slice(m.start, stop), kind))
    return found
