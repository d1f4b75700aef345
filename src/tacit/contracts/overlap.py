"""HOW communication is HIDDEN behind computation."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Overlap(ABC):
    """HOW HIDDEN."""

    @abstractmethod
    def apply_at(self, step: int) -> int:
        """The step after which the answer of the round of `step` is applied."""
