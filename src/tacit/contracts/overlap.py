"""HOW communication is HIDDEN behind computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Overlap(ABC):
    """HOW HIDDEN."""

    late: ClassVar[bool] = False
    """Whether answers may be applied after a later step than that of their round."""

    @abstractmethod
    def apply_at(self, step: int) -> int:
        """The step after which the answer of a round is applied that would else be applied after `step`."""
