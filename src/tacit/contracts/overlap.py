"""How communication is hidden behind computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Overlap(ABC):
    """How communication is hidden.

    Attributes:
        steps: how many steps late answers are applied; 0: at once.
        warmup_steps: for gradients: answers of so many first steps are applied at once.
        megabytes: layer by layer, gradients are joined up to this size; None: as planned from the times of
            the first steps.
        credit: layer by layer, megabytes that may be under way at once, or one message; None: any number.
        into_forward: whether messages may be under way until the next forward pass needs their parameters.
        split: whether the all-gathers of all messages leave after all reduce-scatters, in the order of the
            next forward pass.
    """

    layerwise: ClassVar[bool] = False
    """Whether gradients are sent as soon as backward has them, in messages that are not DDP's buckets."""

    steps: int = 0
    warmup_steps: int = 0
    megabytes: float | None = None
    credit: float | None = None
    into_forward: bool = False
    split: bool = False

    @abstractmethod
    def apply_at(self, step: int) -> int:
        """The step after which an answer is applied; without this overlap it would be `step`."""
