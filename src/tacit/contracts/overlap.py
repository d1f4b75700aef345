"""How communication is hidden behind computation."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Overlap(ABC):
    """How communication is hidden."""

    @abstractmethod
    def apply_at(self, step: int) -> int:
        """The step after which the answer of a round is applied that would else be applied after `step`."""


class LateOverlap(Overlap):
    """Answers may be applied after a later step than that of their round.

    Attributes:
        steps: how many steps late they are.
        warmup_steps: for gradients: answers of so many first steps are applied at once.
    """

    steps: int
    warmup_steps: int
