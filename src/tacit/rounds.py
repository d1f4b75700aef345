"""WHEN replicas talk. Pure state machines: every rank decides alike, without asking."""

from __future__ import annotations

from dataclasses import dataclass

from tacit.contracts import Memory, Rounds
from tacit.errors import ConfigError


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
        if self.sync_every < 1:
            raise ConfigError(f"sync_every={self.sync_every} is not possible: write 1 or more steps")

    def due(self, step: int, memory: Memory) -> bool:
        """After steps K - 1, 2K - 1, ... (counted from 0)."""
        return (step + 1) % self.sync_every == 0
