"""What a server counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tacit.lab.testbed import counters
from tacit.transports.pairs import Header, Kind


@dataclass
class Tally:
    """Sums since the server's start.

    Attributes:
        pushes: messages that were pushed, whole; `pushed`, their bytes.
        pulls: answers that were sent; `pulled`, their bytes.
        queued: seconds that messages waited for their turn, once they had come.
        busy: seconds spent on messages.
    """

    pushes: int = 0
    pushed: int = 0
    pulls: int = 0
    pulled: int = 0
    queued: float = 0.0
    busy: float = 0.0

    def arrived(self, header: Header, queued: float) -> None:
        """A message gets its turn."""
        self.queued += queued
        if header.kind == Kind.PUSH:
            self.pushes += 1
            self.pushed += header.nbytes

    def answered(self, nbytes: int) -> None:
        """An answer leaves."""
        self.pulls += 1
        self.pulled += nbytes

    def facts(self) -> dict[str, Any]:
        """All of them, and what the interface has sent since it was made; None where there is none."""
        interface = os.environ.get("TACIT_INTERFACE")
        return {
            "pushes": self.pushes,
            "push_bytes": self.pushed,
            "pulls": self.pulls,
            "pull_bytes": self.pulled,
            "queue_seconds": self.queued,
            "busy_seconds": self.busy,
            "transmitted": counters.transmitted(interface) if interface else None,
        }
