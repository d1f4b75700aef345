"""HOW communication is HIDDEN behind computation."""

from __future__ import annotations

from dataclasses import dataclass

from tacit.contracts import Overlap


@dataclass(frozen=True)
class Bucketwise(Overlap):
    """Each lot leaves as soon as backward has filled it; all land before the optimizer steps (WFBP)."""

    def lands(self, step: int) -> int:
        """At once."""
        return step
