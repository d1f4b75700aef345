"""Detects writes to parameters by others than the optimizers and the session."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from tacit.errors import AttachError
from tacit.model.parameter_sample import ParameterSample
from tacit.replicas.replica import LiveTensors
from tacit.strategy import Strategy

_log = logging.getLogger("tacit")


class OutsideWrites:
    """Distinguishes writes that belong to training from those after which replicas have another common point.

    Writes in every step, such as clamping weights, are part of a replica's step. Values that are written and
    then restored, as for an evaluation, are none. A single write, such as loading weights, moves the common
    point: `sync` makes it known to all ranks, and without `sync` it is an error two steps later.

    Args:
        strategy: at work on the replicas.
        named: their parameters.
    """

    def __init__(self, strategy: Strategy, named: Mapping[str, Tensor]) -> None:
        self._strategy, self._sample = (
            strategy,
            ParameterSample(named.fixed if isinstance(named, LiveTensors) else named),
        )
        self._written: int | None = None
        self._far = self._carried = 0.0
        self._recent = self._told = self._started = self._loaded = False

    def note(self) -> None:
        """Record the parameters as steps and rounds have left them."""
        self._sample.note()

    @property
    def seen(self) -> bool:
        """Whether the parameters have changed since the last step and round."""
        return self._sample.changed()

    def resume(self) -> None:
        """Expect that the model, too, is loaded before the next step, as the session's checkpoint was."""
        self._loaded = True

    def settle(self) -> bool:
        """Whether this replica was written by no step, before all ranks become equal."""
        far = self._sample.moved()
        changed = far > 1
        unexplained = not self._loaded and (self._written is not None or (changed and not self._recent))
        self._carried = far if self._recent else 0.0
        self._written = None
        return unexplained

    def before_step(self, step: int) -> bool:
        """Check the parameters before a step. Returns whether they are a new common point.

        Raises:
            AttachError: they were written before the last step, and not before this one.
        """
        started, self._started = self._started, True
        far, self._carried = max(self._carried, self._sample.moved(waits=not started)), 0.0
        changed = far > 1
        loaded, self._loaded = self._loaded, False
        if loaded:
            self._written = None
            return False
        if changed and self._strategy.independent and not self._recent:
            raise lost_at_servers(self._strategy.name)
        if changed and not started:
            return True
        if self._written is not None and far <= min(1, self._far / 100):  # rounding of some steps is below 1
            raise AttachError(
                f"the parameters were changed before step {self._written} by something that is no step of "
                f"the optimizers, and {self._strategy.name!r} would take it for training. Where weights are "
                "loaded or exchanged, call session.sync() right after that, on every rank: all go on from "
                "there then"
            )
        self._written, self._far = step if changed and not self._recent else None, far
        if changed and self._recent and not self._told and self._strategy.merge.keeps_unsent:
            self._told = True
            _log.warning(
                "the parameters are changed after every step, as where weights are clamped: %r adds what it "
                "has not sent yet to them, so they may leave those bounds. Change them once more before an "
                "evaluation, or attach 'localsgd' or 'dense'",
                self._strategy.name,
            )
        self._recent = changed
        return False


def lost_at_servers(name: str) -> AttachError:
    """The error for a write that the server or store which keeps the parameters does not know."""
    return AttachError(
        f"the parameters were changed by something that is no step of the optimizers, and those of {name!r} "
        "are kept outside of the model, where this is not known: load weights before you attach"
    )
