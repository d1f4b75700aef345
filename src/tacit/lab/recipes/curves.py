"""What of a recipe's training is drawn as curves, by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tacit.files import spared
from tacit.hooks.scalars import Measured, ScalarWriter, log_metrics

__all__ = ["NO_CURVES", "Curves"]


class CurveWriter(ScalarWriter, Protocol):
    """What draws; `torch.utils.tensorboard.SummaryWriter` is one."""

    def close(self) -> None:
        """Write what has not been written."""


@dataclass(frozen=True)
class Curves:
    """Tells a writer how training goes; without a writer, nobody. A disk that takes nothing is said once."""

    writer: CurveWriter | None = None

    def batch(self, step: int, loss: Tensor) -> None:
        """The loss of this rank's batch, after its step."""
        self._draw(lambda writer: writer.add_scalar("train/loss", loss.item(), step))

    def held_out(self, step: int, loss: float, accuracy: float) -> None:
        """The mean over the ranks, after an epoch."""
        self._draw(lambda writer: writer.add_scalar("test/loss", loss, step))
        self._draw(lambda writer: writer.add_scalar("test/accuracy", accuracy, step))

    def numbers(self, step: int, session: Measured) -> None:
        """What the session has counted on this rank."""
        self._draw(lambda writer: log_metrics(writer, session, step))

    def close(self) -> None:
        """Write the rest."""
        self._draw(lambda writer: writer.close())

    def _draw(self, point: Callable[[CurveWriter], object]) -> None:
        if self.writer is not None:
            with spared("curves are not drawn any more"):
                point(self.writer)


NO_CURVES = Curves()
