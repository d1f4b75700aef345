"""What of a recipe's training is drawn as curves, by step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tacit.doors.scalars import Measured, ScalarWriter, log_metrics

__all__ = ["NO_CURVES", "Curves"]


@dataclass(frozen=True)
class Curves:
    """Tells a writer how training goes; without a writer, nobody."""

    writer: ScalarWriter | None = None

    def batch(self, step: int, loss: Tensor) -> None:
        """The loss of this rank's batch, after its step."""
        if self.writer is not None:
            self.writer.add_scalar("train/loss", loss.item(), step)

    def held_out(self, step: int, loss: float, accuracy: float) -> None:
        """The mean over the ranks, after an epoch."""
        if self.writer is not None:
            self.writer.add_scalar("test/loss", loss, step)
            self.writer.add_scalar("test/accuracy", accuracy, step)

    def numbers(self, step: int, session: Measured) -> None:
        """What the session has counted on this rank."""
        if self.writer is not None:
            log_metrics(self.writer, session, step)


NO_CURVES = Curves()
