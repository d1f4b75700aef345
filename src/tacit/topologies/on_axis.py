"""What topologies share that go by one axis."""

from __future__ import annotations

from dataclasses import dataclass

from tacit import checks
from tacit.contracts import NET, NODE, WORLD, Topology


@dataclass(frozen=True)
class OnAxis(Topology):
    """All replicas of an axis talk to each other, whatever lies between them.

    Attributes:
        axis: "world": all replicas. "node": those of one node; nodes then know nothing of each other: the
            near level of `Levels`. "net": those with the same place in their nodes.
    """

    axis: str = WORLD

    def __post_init__(self) -> None:
        checks.word("axis", self.axis, (WORLD, NODE, NET))

    @property
    def scope(self) -> str:  # type: ignore[override]
        """The axis."""
        return self.axis

    @property
    def meets(self) -> str:  # type: ignore[override]
        """The axis."""
        return self.axis
