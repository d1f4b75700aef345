"""The last answers, equal on all ranks, and predictions from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.contracts import Matrix, Transmitted
from tacit.kernels.dispatch import on_host
from tacit.prediction.predictor import Predictor, Seen, in_a_row, kind_of


def fields(depth: int, round_: int) -> list[str]:
    """The names of the last `depth` answers before this round, oldest first; that one is replaced next."""
    return [f"past{(round_ + i) % depth}" for i in range(depth)]


def predict_(
    out: Tensor, predictor: Predictor, past: Sequence[Tensor], matrices: Sequence[Matrix], scale: float = 1.0
) -> None:
    """Overwrite these parameters in `out` (flat) with `scale` times the predicted changes.

    `past`: all changes of the last rounds, oldest first. Where no parameters are given, all of it is one
    vector.
    """
    for mine, kind in _spans(matrices or (Matrix(0, 1, out.numel()),), joined=not on_host(out)):
        parts = [each[mine] for each in past]

        def seen(piece: slice, parts: Sequence[Tensor] = parts) -> Seen:
            return in_a_row(torch.stack([part[piece] for part in parts]))

        predictor.write(seen, kind, out[mine], scale)


def _spans(matrices: Sequence[Matrix], joined: bool) -> list[tuple[slice, str]]:
    """Where each matrix lies, and its kind; `joined`: neighbours of one kind are one span."""
    found: list[tuple[slice, str]] = []
    for m in matrices:
        stop, kind = m.start + m.rows * m.columns, kind_of(m.dims)
        if joined and found and found[-1][0].stop == m.start and found[-1][1] == kind:
            found[-1] = slice(found[-1][0].start, stop), kind
        else:
            found.append((slice(m.start, stop), kind))
    return found


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
