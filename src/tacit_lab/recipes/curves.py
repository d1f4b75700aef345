"""Curves of a recipe's training, by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tacit.files import spared
from tacit.reporting.scalars import Measured, ScalarWriter, log_metrics


class CurveWriter(ScalarWriter, Protocol):
    """Draws curves; `torch.utils.tensorboard.SummaryWriter` is one."""

    def close(self) -> None:
        """Flush, and close the file."""


@dataclass(frozen=True)
class Curves:
    """Passes the numbers of a training to a writer, if there is one. A full disk is reported once."""

    writer: CurveWriter | None = None

    def batch(self, step: int, loss: Tensor) -> None:
        """Draw the loss of this rank's batch, after its step."""
        self._draw(lambda writer: writer.add_scalar("train/loss", loss.item(), step))

    def held_out(self, step: int, loss: float, accuracy: float) -> None:
        """Draw the mean loss and accuracy over the ranks, after an epoch."""
        self._draw(lambda writer: writer.add_scalar("test/loss", loss, step))
        self._draw(lambda writer: writer.add_scalar("test/accuracy", accuracy, step))

    def numbers(self, step: int, session: Measured) -> None:
        """Draw the session's metrics on this rank."""
        self._draw(lambda writer: log_metrics(writer, session, step))

    def close(self) -> None:
        """Close the writer."""
        self._draw(lambda writer: writer.close())

    def _draw(self, point: Callable[[CurveWriter], object]) -> None:
        if self.writer is not None:
            with spared("curves are not drawn any more"):
                point(self.writer)


NO_CURVES = Curves()
