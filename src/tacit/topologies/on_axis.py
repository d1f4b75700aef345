"""What topologies on one axis share."""

from __future__ import annotations

from dataclasses import dataclass

from tacit import checks
from tacit.contracts import NET, NODE, WORLD, Topology


@dataclass(frozen=True)
class OnAxis(Topology):
    """All replicas of an axis exchange with each other, whatever network lies between them.

    Attributes:
        axis: "world": all replicas. "node": those of one node, as the level inside nodes of `Levels`: nodes
            then do not exchange. "net": those with the same rank in their nodes.
    """

    axis: str = WORLD

    def __post_init__(self) -> None:
        checks.one_of("axis", self.axis, (WORLD, NODE, NET))

    @property
    def scope(self) -> str:  # type: ignore[override]
        """`axis`."""
        return self.axis

    @property
    def meets(self) -> str:  # type: ignore[override]
        """`axis`."""
        return self.axis
