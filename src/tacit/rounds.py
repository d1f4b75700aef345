"""WHEN replicas talk. Pure state machines: every rank decides alike, without asking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tacit import checks
from tacit.contracts import Memory, Rounds


@dataclass(frozen=True)
class EveryStep(Rounds):
    """After every attempt of the optimizer: synchronous training."""

    def due(self, step: int, memory: Memory) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Every(Rounds):
    """After every `sync_every`-th attempt. Larger says less, and lets replicas drift further apart."""

    sync_every: int

    def __post_init__(self) -> None:
        checks.whole("sync_every", self.sync_every, 1, None, "write 1 or more steps, 8 are usual")

    def due(self, step: int, memory: Memory) -> bool:
        """After steps K - 1, 2K - 1, ... (counted from 0)."""
        return (step + 1) % self.sync_every == 0


@dataclass(frozen=True)
class EveryEpoch(Rounds):
    """Once an epoch, after its last step."""

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch"})

    def due(self, step: int, memory: Memory) -> bool:
        """After steps S - 1, 2S - 1, ... (counted from 0), of S steps an epoch."""
        return (step + 1) % int(memory["steps_per_epoch"]) == 0
