"""Checksums by which ranks notice that their predictions differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.contracts import Context, Transmitted
from tacit.errors import RoundError

MARKS = 3
"""Numbers added to each message: checksums of the state, and the learning rate."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


_CHECKS = 32


def checksum(answer: Tensor) -> int:
    """A checksum of the bits of an answer: a number of 5 bits, which fp32 holds exactly, and its square."""
    return int(answer.view(_BITS[answer.element_size()]).sum()) % _CHECKS


def mark(marks: Tensor, checksums: Tensor, lr: float) -> None:
    """Write the checksum of the parameters' checksums, its square, and the learning rate.

    The means of the first two show on every rank whether all ranks have the same.
    """
    if marks.is_meta:
        return
    whole = int(checksums.sum()) % _CHECKS
    marks[0], marks[1], marks[2] = whole, whole * whole, lr


def compare(marks: Tensor, ctx: Context) -> None:
    """Raise if the ranks' histories differ.

    Raises:
        RoundError: on all ranks, in the round after histories differ, or soon after.
    """
    if marks.is_meta:
        return
    mean, square, _ = marks.tolist()
    if square - mean * mean > 0.5 / ctx.peers:
        raise RoundError(
            f"in step {ctx.step} the ranks predict differently in the bucket of {ctx.name}: the versions of "
            "torch, the processors or the predictor's files are not the same on all. Make them the same, or "
            "write predictor=Stale()"
        )


@dataclass(frozen=True)
class Mirrored(Transmitted):
    """The contribution of this rank: its entries where they were sent, and elsewhere the prediction."""

    answer: Tensor
    index: Tensor
    mine: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        """The difference between this rank's entries and the prediction remains, where nothing was sent."""
        new_residual.sub_(self.answer)
        new_residual.index_add_(0, self.index, self.answer[self.index] - self.mine)

    def dense(self, like: Tensor) -> Tensor:
        """Sent entries and predictions, as one tensor."""
        return self.answer.clone().index_copy_(0, self.index, self.mine).view_as(like)
