"""The last answers, which all ranks remember alike, and what is foretold from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.contracts import Matrix, Sent
from tacit.predictors import Predictor, kind_of


def fields(depth: int, round_: int) -> list[str]:
    """The names of the last `depth` answers before this round, oldest first; that is the next to go."""
    return [f"past{(round_ + i) % depth}" for i in range(depth)]


def foretell_(
    out: Tensor, predictor: Predictor, past: Sequence[Tensor], matrices: Sequence[Matrix], scale: float = 1.0
) -> None:
    """Overwrite these parameters in `out` (flat) with `scale` times what the predictor says, without a trend.

    Where no parameters are given, all of it is one vector.
    """
    for m in matrices or (Matrix(0, 1, out.numel()),):
        span = slice(m.start, m.start + m.rows * m.columns)
        seen = [each[span] for each in past]
        predictor.write(seen, torch.zeros(()), kind_of(m.dims), out[span], scale)


@dataclass(frozen=True)
class Shifted(Sent):
    """What was sent, and a tensor that all ranks add to it, unsaid."""

    by: Tensor
    inner: Sent

    def take_from_(self, owed: Tensor) -> None:
        """Both."""
        owed.sub_(self.by)
        self.inner.take_from_(owed)

    def dense(self, like: Tensor) -> Tensor:
        """Their sum."""
        return self.inner.dense(like) + self.by.view_as(like)
